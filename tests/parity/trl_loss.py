"""TRL's real GRPOTrainer around a model of two thousand parameters, and its ``_compute_loss`` on given log-probs.

Only the source of the log-probs is replaced: ratios, clip, reductions and metrics are TRL's own code.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

# transformers' tokenizers load it where it is installed. It is not needed here, and sentencepiece 0.2.1 crashes an
# interpreter that exits normally (a segmentation fault in the destructor of its type capsule).
sys.modules["sentencepiece"] = None  # type: ignore[assignment]

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, models  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from tests.parity.batch import PaddedBatch  # noqa: E402

VOCABULARY = 32


def build_trainer(
    folder: Path,
    *,
    level: Literal["sequence", "token"],
    eps_low: float,
    eps_high: float,
    temperature: float = 1.0,
    loss_type: str = "grpo",
    of: tuple[type[GRPOTrainer], type[GRPOConfig]] = (GRPOTrainer, GRPOConfig),
) -> GRPOTrainer:
    """Return TRL's trainer (``of``: it, or one made from it), without KL term and vLLM, ready to compute a training loss."""
    words = {f"t{i}": i for i in range(VOCABULARY - 2)} | {"<pad>": VOCABULARY - 2, "<eos>": VOCABULARY - 1}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="t0")), pad_token="<pad>", eos_token="<eos>"
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            initializer_range=0.5,
        )
    )
    make_trainer, make_config = of
    settings = make_config(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        per_device_train_batch_size=2,
        num_generations=2,
        importance_sampling_level=level,
        loss_type=loss_type,
        epsilon=eps_low,
        epsilon_high=eps_high,
        beta=0.0,
        temperature=temperature,
    )
    trainer = make_trainer(
        model=model,
        reward_funcs=_no_reward,
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": ["t1", "t2"]}),
        processing_class=tokenizer,
    )
    # transformers' training loop sets this before each optimizer step.
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def _no_reward(completions: list[str], **_: Any) -> list[float]:
    return [0.0] * len(completions)


def loss_of_given(trainer: GRPOTrainer, logprobs_SL: Tensor, batch: PaddedBatch, advantages: Tensor) -> Tensor:
    """Return TRL's ``_compute_loss`` at ``logprobs_SL``; ``advantages`` is [S], or [S, L] as for subclasses."""
    num_sequences, length = logprobs_SL.shape

    class GivenLogProbs(type(trainer)):  # type: ignore[misc]
        def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
            return logprobs_SL, torch.zeros_like(logprobs_SL), None

    given = GivenLogProbs.__new__(GivenLogProbs)
    given.__dict__.update(trainer.__dict__)
    given._metrics["train"].clear()
    inputs = {
        "prompt_ids": torch.ones(num_sequences, 1, dtype=torch.int64),
        "prompt_mask": torch.ones(num_sequences, 1, dtype=torch.int64),
        "completion_ids": torch.ones(num_sequences, length, dtype=torch.int64),
        "completion_mask": batch.inside_SL.long(),
        "tool_mask": batch.action_SL.long(),
        "advantages": advantages,
        "old_per_token_logps": batch.anchor_SL,
        "num_items_in_batch": (batch.inside_SL & batch.action_SL).sum() * trainer.args.steps_per_generation,
    }
    return given._compute_loss(given.model, inputs)
