"""Responses in rows: the loss, gradients, statistics and per-token results of the packed layout."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from gspo.loss import objective_loss
from gspo.padded import padded_loss
from gspo.settings import Objective
from tests.support.loss.loss_cases import Flat, pack, pad, random_sequence

LENGTHS = (3, 7, 1, 5)


def rows_and_packed() -> tuple[Flat, Flat]:
    """The same sequences twice: [S, L] with NaN and impossible ids in the padding, and end to end."""
    generator = torch.Generator().manual_seed(3)
    sequences = [random_sequence(generator, [t != 1 or n < 3 for t in range(n)]) for n in LENGTHS]
    return pad(sequences), pack(sequences)


def as_rows(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(len(LENGTHS), -1)


@pytest.mark.parametrize("anchor", ["behaviour", "proximal"])
@pytest.mark.parametrize("ratio_unit", ["sequence", "turn"])
def test_rows_are_the_packed_layout_to_the_bit(anchor: str, ratio_unit: str) -> None:
    padded, packed = rows_and_packed()
    objective = Objective(anchor=anchor, ratio_unit=ratio_unit, kl_coefficient=0.1)  # type: ignore[arg-type]
    lag_S = torch.tensor([0, 1, 2, 0])
    inside = as_rows(padded.sequence_ids_T >= 0)
    proximal_SL = as_rows(padded.anchor_T) + 1e-3
    is_proximal = anchor == "proximal"
    output = padded_loss(
        objective,
        as_rows(padded.logprobs_T),
        as_rows(padded.anchor_T),
        as_rows(padded.advantages_T),
        as_rows(padded.mask_T),
        as_rows(padded.turn_ids_T),
        num_sequences=9,
        lag_S=lag_S,
        sigma=1e-3,
        clip_scale=2.0,
        proximal_logprobs_SL=proximal_SL if is_proximal else None,
        reference_logprobs_SL=as_rows(padded.anchor_T) - 0.2,
        entropy_SL=as_rows(padded.anchor_T),
        group_ids_S=torch.tensor([0, 0, 1, 1]),
        with_tokens=True,
    )
    expected = objective_loss(
        objective,
        packed.logprobs_T,
        packed.anchor_T,
        packed.advantages_T,
        packed.mask_T,
        packed.sequence_ids_T,
        packed.turn_ids_T,
        num_sequences=9,
        lag_S=lag_S,
        sigma=1e-3,
        clip_scale=2.0,
        proximal_logprobs_T=packed.anchor_T + 1e-3 if is_proximal else None,
        reference_logprobs_T=packed.anchor_T - 0.2,
        entropy_T=packed.anchor_T,
        group_ids_S=torch.tensor([0, 0, 1, 1]),
        with_tokens=True,
    )
    assert torch.equal(output.loss, expected.loss)
    torch.testing.assert_close(output.stats.as_matrix(), expected.stats.as_matrix(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(as_rows(padded.gradient(output))[inside], packed.gradient(expected))
    assert output.tokens is not None
    assert expected.tokens is not None
    for name in ("ratio", "clipped_high", "clipped_low"):
        assert torch.equal(getattr(output.tokens, name)[inside], getattr(expected.tokens, name)), name
    assert set(output.tokens.ratio[~as_rows(padded.mask_T)].tolist()) == {1.0}
    assert not (output.tokens.clipped_high | output.tokens.clipped_low)[~as_rows(padded.mask_T)].any()


def test_one_advantage_per_row_is_that_of_its_tokens_and_empty_rows_are_counted() -> None:
    mask_SL = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
    logprobs_SL = torch.zeros(3, 3, requires_grad=True)
    advantages_S = torch.tensor([1.0, -0.5, 9.0])
    by_row = padded_loss(Objective.gspo(), logprobs_SL, torch.zeros(3, 3), advantages_S, mask_SL, num_sequences=3)
    assert by_row.loss.item() == pytest.approx(-(1.0 - 0.5) / 3)
    (gradient_SL,) = torch.autograd.grad(by_row.loss, logprobs_SL)
    expected = [[-1 / 6, -1 / 6, 0.0], [0.5 / 3, 0.0, 0.0], [0.0, 0.0, 0.0]]
    torch.testing.assert_close(gradient_SL, torch.tensor(expected))
    assert by_row.stats.num_tokens_S.tolist() == [2.0, 1.0, 0.0]
    assert by_row.tokens is None


def test_the_tokens_that_were_clipped_and_their_ratios_come_back_when_asked_for() -> None:
    logprobs_SL = torch.tensor([[0.3, 0.1], [-0.3, 0.1]], dtype=torch.float64, requires_grad=True)
    arguments = (logprobs_SL, torch.zeros_like(logprobs_SL), torch.tensor([1.0, -1.0]), torch.ones(2, 2, dtype=torch.bool))
    tokens = padded_loss(Objective.grpo(), *arguments, num_sequences=2, with_tokens=True).tokens
    assert tokens is not None
    assert tokens.ratio.tolist() == [
        pytest.approx([math.exp(0.3), math.exp(0.1)]),
        pytest.approx([math.exp(-0.3), math.exp(0.1)]),
    ]
    assert tokens.clipped_high.tolist() == [[True, False], [False, False]]
    assert tokens.clipped_low.tolist() == [[False, False], [True, False]]
    assert not tokens.ratio.requires_grad
    by_sequence = padded_loss(Objective.gspo(), *arguments, num_sequences=2, with_tokens=True).tokens
    assert by_sequence is not None
    assert by_sequence.ratio.tolist() == [pytest.approx([math.exp(0.2)] * 2), pytest.approx([math.exp(-0.1)] * 2)]
    assert by_sequence.clipped_high.tolist() == [[True, True], [False, False]]


def test_shapes_that_do_not_fit_together_are_named() -> None:
    rows = torch.zeros(2, 3)
    mask_SL = torch.ones(2, 3, dtype=torch.bool)
    for message, arguments in {
        r"logprobs_SL has shape \(6,\); give \[S, L\]": (rows.reshape(-1), rows, torch.ones(2), mask_SL),
        r"behaviour_logprobs_SL has shape \(2, 4\) where logprobs_SL has \(2, 3\)": (
            rows,
            torch.zeros(2, 4),
            torch.ones(2),
            mask_SL,
        ),
        r"mask_SL has shape \(2,\)": (rows, rows, torch.ones(2), mask_SL[:, 0]),
        r"advantages has shape \(3,\); give \(2,\) or \(2, 3\)": (rows, rows, torch.ones(3), mask_SL),
    }.items():
        with pytest.raises(ValueError, match=message):
            padded_loss(Objective.gspo(), *arguments, num_sequences=2)


def test_lag_and_sigma_are_0_unless_they_are_given() -> None:
    _, packed = rows_and_packed()
    arguments = (packed.logprobs_T, packed.anchor_T, packed.advantages_T, packed.mask_T, packed.sequence_ids_T)
    objective = Objective(anchor="behaviour", clip_range_growth=3.0, noise_z=2.0)
    plain = objective_loss(objective, *arguments, num_sequences=4)
    told = objective_loss(objective, *arguments, num_sequences=4, lag_S=torch.zeros(4), sigma=0.0)
    assert torch.equal(plain.loss, told.loss)
    assert torch.equal(plain.stats.as_matrix().nan_to_num(), told.stats.as_matrix().nan_to_num())
    hidden = replace(packed, mask_T=torch.zeros_like(packed.mask_T), sequence_ids_T=packed.sequence_ids_T - 99)
    nothing = (hidden.logprobs_T, hidden.anchor_T, hidden.advantages_T, hidden.mask_T, hidden.sequence_ids_T)
    assert objective_loss(objective, *nothing, num_sequences=1).stats.num_tokens_S.tolist() == [0.0]


def test_the_default_objective_is_the_papers_in_a_loop_that_measures_nothing() -> None:
    _, packed = rows_and_packed()
    arguments = (packed.logprobs_T, packed.anchor_T, packed.advantages_T, packed.mask_T, packed.sequence_ids_T)
    plain, papers = (objective_loss(each, *arguments, num_sequences=4) for each in (Objective(), Objective.gspo()))
    assert torch.equal(packed.gradient(plain), packed.gradient(papers))
    assert plain.stats.clip_high_S.tolist() == papers.stats.clip_high_S.tolist()


def test_the_proximal_anchor_without_proximal_log_probs_says_what_to_give() -> None:
    _, packed = rows_and_packed()
    arguments = (packed.logprobs_T, packed.anchor_T, packed.advantages_T, packed.mask_T, packed.sequence_ids_T)
    proximal = Objective(anchor="proximal")
    with pytest.raises(ValueError, match=r"logprobs_T\.detach\(\) in the batch's first step.*Objective\(\)"):
        objective_loss(proximal, *arguments, num_sequences=4)
    first_step = objective_loss(proximal, *arguments, num_sequences=4, proximal_logprobs_T=packed.logprobs_T.detach())
    assert first_step.stats.log_ratio_S.tolist() == [0.0] * 4
    assert packed.gradient(first_step).abs().sum().item() > 0
