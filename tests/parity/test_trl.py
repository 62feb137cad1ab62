"""The loss against TRL's GRPOTrainer: they agree where both mean the same, and these tests show where they differ.

Run by ``make test-parity``, which installs the TRL of requirements/parity.txt. Both sides: lag 0, no KL term, no
correction for the sampler. TRL's loss is a mean over the local batch; N is its size.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from gspo import LossOutput, Objective, clip_range, gspo_loss
from gspo.model.logprobs import chunked_logprobs
from tests.parity.batch import PaddedBatch, random_batch

if TYPE_CHECKING:
    from trl import GRPOTrainer

# The log-ratios of a batch scatter about as widely as its clip, so that only some are clipped.
SETTINGS = {"sequence": (3e-4, 4e-4, 7e-4), "token": (0.2, 0.27, 0.25)}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}

pytestmark = pytest.mark.parity


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GRPOTrainer]:
    from tests.parity.trl_loss import build_trainer

    folder = tmp_path_factory.mktemp("trl")
    return {
        level: build_trainer(folder, level=level, eps_low=low, eps_high=high)  # type: ignore[arg-type]
        for level, (low, high, _) in SETTINGS.items()
    }


def our_loss(level: str, logprobs_T: Tensor, batch: PaddedBatch, *, num_sequences: int | None = None) -> LossOutput:
    low, high, _ = SETTINGS[level]
    num_local = batch.advantages_S.shape[0]
    return gspo_loss(
        logprobs_T,
        batch.anchor_SL.reshape(-1),
        batch.advantages_T,
        batch.mask_T,
        batch.sequence_ids_T,
        num_sequences=num_sequences or num_local,
        clip_range=clip_range(batch.advantages_S.new_zeros(num_local), eps_low=low, eps_high=high),
        ratio_unit=level,  # type: ignore[arg-type]
    )


def part(batch: PaddedBatch, rows: slice) -> PaddedBatch:
    return PaddedBatch(*(getattr(batch, name)[rows] for name in PaddedBatch.__dataclass_fields__))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("level", ["sequence", "token"])
def test_loss_gradient_and_clip_fractions_are_those_of_trl(
    trainers: dict[str, GRPOTrainer], level: str, dtype: torch.dtype
) -> None:
    from tests.parity.trl_loss import loss_of_given

    num_clipped = {"low": 0.0, "high": 0.0, "neither": 0.0}
    for seed in range(200):
        batch = random_batch(seed, spread=SETTINGS[level][2], dtype=dtype)
        theirs_SL = batch.logprobs_SL.clone().requires_grad_()
        trl_loss = loss_of_given(trainers[level], theirs_SL, batch, batch.advantages_S)
        trl_loss.backward()
        ours_T = batch.logprobs_SL.reshape(-1).clone().requires_grad_()
        ours = our_loss(level, ours_T, batch)
        ours.loss.backward()
        tolerance = TOLERANCE[dtype]
        assert ours.loss.item() == pytest.approx(trl_loss.item(), rel=tolerance, abs=tolerance / 100)
        assert theirs_SL.grad is not None
        torch.testing.assert_close(ours_T.grad, theirs_SL.grad.reshape(-1), rtol=tolerance, atol=1e-12)
        stats = ours.stats
        if level == "sequence" and bool((stats.num_tokens_S > 0).all()):
            metrics = trainers[level]._metrics["train"]
            assert stats.clipped_low_S.mean().item() == pytest.approx(metrics["clip_ratio/low_mean"][-1])
            assert stats.clipped_high_S.mean().item() == pytest.approx(metrics["clip_ratio/high_mean"][-1])
        num_clipped["low"] += float((stats.clipped_low_S * stats.num_tokens_S).sum())
        num_clipped["high"] += float((stats.clipped_high_S * stats.num_tokens_S).sum())
        num_clipped["neither"] += float(((1 - stats.clipped_low_S - stats.clipped_high_S) * stats.num_tokens_S).sum())
    assert min(num_clipped.values()) > 0.1 * sum(num_clipped.values())


def test_from_logits_at_a_temperature_the_gradients_of_all_parameters_are_those_of_trl(tmp_path: Path) -> None:
    """TRL's own forward pass and log-probs on one side, ``chunked_logprobs`` of the hidden states on the other."""
    from tests.parity.trl_loss import VOCABULARY, build_trainer

    low, high, _ = SETTINGS["sequence"]
    trainer = build_trainer(tmp_path, level="sequence", eps_low=low, eps_high=high, temperature=0.7)
    model = trainer.model
    batch = random_batch(3, spread=5e-4, dtype=torch.float32)
    num_sequences, length = batch.logprobs_SL.shape
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY - 2, (num_sequences, 4 + length), generator=generator)
    attention_mask = torch.cat([torch.ones(num_sequences, 4, dtype=torch.int64), batch.inside_SL.long()], dim=1)

    def our_logprobs() -> Tensor:
        hidden = model.base_model(input_ids=tokens, attention_mask=attention_mask).last_hidden_state[:, 3:-1]
        return chunked_logprobs(
            hidden.reshape(num_sequences * length, -1),
            model.lm_head.weight,
            tokens[:, 4:].reshape(-1),
            torch.full((num_sequences * length,), 0.7),
            chunk_tokens=16,
        ).logprobs_T

    with torch.no_grad():
        drift_SL = batch.logprobs_SL - batch.anchor_SL
        anchor_SL = our_logprobs().reshape(num_sequences, length) - drift_SL
    inputs = {
        "prompt_ids": tokens[:, :4],
        "prompt_mask": attention_mask[:, :4],
        "completion_ids": tokens[:, 4:],
        "completion_mask": batch.inside_SL.long(),
        "tool_mask": batch.action_SL.long(),
        "advantages": batch.advantages_S,
        "old_per_token_logps": anchor_SL,
    }
    trl_loss = trainer.compute_loss(model, inputs)
    theirs = torch.autograd.grad(trl_loss, list(model.parameters()))
    anchored = PaddedBatch(batch.logprobs_SL, anchor_SL, batch.inside_SL, batch.action_SL, batch.advantages_S)
    output = our_loss("sequence", our_logprobs(), anchored)
    ours = torch.autograd.grad(output.loss, list(model.parameters()))
    assert 0 < (output.stats.clipped_low_S + output.stats.clipped_high_S).mean().item() < 1
    assert output.loss.item() == pytest.approx(trl_loss.item(), rel=1e-5)
    for (name, _), our_gradient, their_gradient in zip(model.named_parameters(), ours, theirs, strict=True):
        scale = their_gradient.abs().max().item()
        assert scale > 0, name
        torch.testing.assert_close(our_gradient, their_gradient, rtol=0.0, atol=1e-5 * scale, msg=name)


def test_trl_averages_micro_batches_of_unlike_size_and_this_loss_does_not(trainers: dict[str, GRPOTrainer]) -> None:
    """TRL divides each micro-batch's mean by the number of micro-batches; the sum over N sequences has no such step."""
    from tests.parity.trl_loss import loss_of_given

    batch = next(
        batch
        for batch in (random_batch(seed, spread=5e-4, dtype=torch.float64) for seed in range(100))
        if batch.advantages_S.shape[0] == 9
    )
    whole = our_loss("sequence", batch.logprobs_SL.reshape(-1), batch).loss.item()

    def split(at: int) -> tuple[float, float]:
        trainer = trainers["sequence"]
        theirs = ours = 0.0
        for piece in (part(batch, slice(0, at)), part(batch, slice(at, 9))):
            theirs += loss_of_given(trainer, piece.logprobs_SL, piece, piece.advantages_S).item() / 2
            ours += our_loss("sequence", piece.logprobs_SL.reshape(-1), piece, num_sequences=9).loss.item()
        return theirs, ours

    theirs, ours = split(2)
    assert ours == pytest.approx(whole, rel=1e-12)
    assert abs(theirs - whole) > 0.05 * abs(whole)


def test_with_advantages_per_token_trl_gives_every_token_the_mean_where_gspo_token_gives_each_its_own(
    trainers: dict[str, GRPOTrainer],
) -> None:
    """Ratio 1, two tokens, A = (1, -3): TRL's level "sequence" differentiates through s_i, GSPO-token through each token."""
    from tests.parity.trl_loss import loss_of_given

    zeros = torch.zeros(1, 2, dtype=torch.float64)
    everywhere = torch.ones(1, 2, dtype=torch.bool)
    batch = PaddedBatch(zeros, zeros, everywhere, everywhere, torch.zeros(1, dtype=torch.float64))
    advantages_SL = torch.tensor([[1.0, -3.0]], dtype=torch.float64)
    theirs_SL = zeros.clone().requires_grad_()
    trl_loss = loss_of_given(trainers["sequence"], theirs_SL, batch, advantages_SL)
    trl_loss.backward()
    ours_T = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    output = gspo_loss(
        ours_T,
        torch.zeros(2),
        advantages_SL.reshape(-1),
        batch.mask_T,
        batch.sequence_ids_T,
        num_sequences=1,
        clip_range=clip_range(torch.zeros(1), eps_low=3e-4, eps_high=4e-4),
    )
    output.loss.backward()
    assert output.loss.item() == trl_loss.item() == 1.0
    assert theirs_SL.grad is not None
    assert ours_T.grad is not None
    assert theirs_SL.grad.tolist() == [[0.5, 0.5]]
    assert ours_T.grad.tolist() == [-0.5, 1.5]


def test_trl_lets_a_ratio_grow_without_bound_where_this_loss_clamps_its_logarithm(trainers: dict[str, GRPOTrainer]) -> None:
    from tests.parity.trl_loss import loss_of_given

    logprobs_SL = torch.full((1, 3), -0.5, dtype=torch.float64)
    everywhere = torch.ones(1, 3, dtype=torch.bool)
    batch = PaddedBatch(logprobs_SL, logprobs_SL - 12, everywhere, everywhere, torch.tensor([-1.0], dtype=torch.float64))
    assert loss_of_given(trainers["sequence"], logprobs_SL, batch, batch.advantages_S).item() == pytest.approx(162754.79)
    assert our_loss("sequence", logprobs_SL.reshape(-1), batch).loss.item() == pytest.approx(22026.466)


def test_what_stands_in_the_padding_reaches_the_loss_of_trl_but_not_this_one(trainers: dict[str, GRPOTrainer]) -> None:
    from tests.parity.trl_loss import loss_of_given

    logprobs_SL = torch.tensor([[-0.5, float("nan")]])
    inside_SL = torch.tensor([[True, False]])
    batch = PaddedBatch(logprobs_SL, torch.full((1, 2), -0.5), inside_SL, inside_SL, torch.tensor([1.0]))
    assert loss_of_given(trainers["sequence"], logprobs_SL, batch, batch.advantages_S).isnan()
    assert our_loss("sequence", logprobs_SL.reshape(-1), batch).loss.item() == -1.0


def test_the_presets_have_the_clip_of_this_comparison() -> None:
    for objective, level in ((Objective.gspo(), "sequence"), (Objective.grpo(), "token")):
        assert objective.ratio_unit == level
        assert (objective.eps_low, objective.eps_high) == SETTINGS[level][:2]
