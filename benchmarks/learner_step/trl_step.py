"""TRL's real GRPOTrainer makes whole optimizer steps on given rows: its own loss, backward, clipping and AdamW."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# transformers' tokenizers load it where it is installed. It is not needed here, and sentencepiece 0.2.1 crashes an
# interpreter that exits normally (a segmentation fault in the destructor of its type capsule).
sys.modules["sentencepiece"] = None  # type: ignore[assignment]

from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, models  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from benchmarks.learner_step.batches import padded_micro_batches  # noqa: E402
from benchmarks.learner_step.models import Shape, build  # noqa: E402
from benchmarks.learner_step.steps import LEARNING_RATE, Step  # noqa: E402
from gspo.advantages import group_advantages  # noqa: E402
from gspo.model.packing import TrainGroup  # noqa: E402


class _GivenInputs(GRPOTrainer):  # type: ignore[misc]
    """Rows come from the caller: nothing is generated or scored."""

    def _prepare_inputs(self, generation_batch: dict[str, Any]) -> dict[str, Any]:
        return generation_batch


class TrlTrainer:
    """Return a GRPOTrainer with sequence ratios, without KL term, in the model's dtype, on one process."""

    def __init__(self, shape: Shape, dtype: str, folder: Path, *, num_micro_batches: int, rows: int) -> None:
        words = {f"t{i}": i for i in range(shape.vocabulary - 2)}
        words |= {"<pad>": shape.vocabulary - 2, "<eos>": shape.vocabulary - 1}
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="t0")), pad_token="<pad>", eos_token="<eos>"
        )
        settings = GRPOConfig(
            output_dir=str(folder),
            use_cpu=True,
            bf16=False,  # The model already has its training dtype; there is no autocast.
            gradient_checkpointing=False,
            report_to=[],
            per_device_train_batch_size=rows // num_micro_batches,
            gradient_accumulation_steps=num_micro_batches,
            num_generations=2,
            importance_sampling_level="sequence",
            loss_type="grpo",
            epsilon=3e-4,
            epsilon_high=4e-4,
            beta=0.0,
            learning_rate=LEARNING_RATE,
            optim="adamw_torch",
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
        )
        self._trainer = _GivenInputs(
            model=build(shape, dtype),
            reward_funcs=_no_reward,
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": ["t1", "t2"]}),
            processing_class=tokenizer,
        )
        self._trainer.create_optimizer()
        self._trainer.current_gradient_accumulation_steps = num_micro_batches
        self._num_micro_batches = num_micro_batches
        self._pad = shape.vocabulary - 2

    def step(self, groups: Sequence[TrainGroup]) -> Step:
        """Make one optimizer step as transformers' training loop does after generation.

        It calls training_step for each micro-batch, then clipping and AdamW. The rows are padded beforehand.
        """
        trainer = self._trainer
        rewards = [reward for group in groups for reward in group.rewards.tolist()]
        group_ids = [index for index, group in enumerate(groups) for _ in group.rewards]
        advantages = group_advantages(rewards, group_ids).advantages_M
        micro_batches = padded_micro_batches(groups, advantages, self._num_micro_batches, self._pad)

        def make() -> None:
            for inputs in micro_batches:
                trainer.training_step(trainer.model, inputs, None)
            trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), trainer.args.max_grad_norm)
            trainer.optimizer.step()
            trainer.model.zero_grad()
            trainer._metrics["train"].clear()

        return make


def _no_reward(completions: list[str], **_: Any) -> list[float]:
    return [0.0] * len(completions)
