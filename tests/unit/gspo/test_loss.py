"""The loss on examples that can be computed by hand; ``test_conformance`` has its general properties."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from gspo.loss import gspo_loss, objective_loss
from gspo.settings import Objective, RatioUnit, TisMode
from gspo.staleness import clip_range
from tests.support.loss.loss_cases import EPS_HIGH, EPS_LOW, one_sequence, pack, random_sequence

UNITS: tuple[RatioUnit, ...] = ("sequence", "turn", "token")


def test_turns_of_one_sequence_have_their_own_ratios() -> None:
    sequence = one_sequence([0.1, 0.1, -0.1, -0.1], 1.0, turns=[0, 0, 1, 1])
    by_turn = pack([sequence], torch.float64).loss(1, ratio_unit="turn", eps_low=0.3, eps_high=0.3)
    by_sequence = pack([sequence], torch.float64).loss(1, ratio_unit="sequence", eps_low=0.1, eps_high=0.1)
    assert by_turn.loss.item() == pytest.approx(-(math.exp(0.1) + math.exp(-0.1)) / 2)
    assert by_sequence.loss.item() == pytest.approx(-1.0)


def test_equal_turn_ids_of_different_sequences_are_different_turns() -> None:
    sequences = [one_sequence([0.1, 0.1], 1.0), one_sequence([-0.1, -0.1], 1.0)]
    output = pack(sequences, torch.float64).loss(2, ratio_unit="turn", eps_low=0.3, eps_high=0.3)
    assert output.stats.objective_S.tolist() == pytest.approx([math.exp(0.1), math.exp(-0.1)])


def test_a_long_sequence_weighs_as_much_as_a_short_one() -> None:
    output = pack([one_sequence([0.0] * 100, 1.0), one_sequence([0.0], -1.0)]).loss(2)
    assert output.loss.item() == pytest.approx(0.0, abs=1e-7)


def test_float32_decides_the_clip_closer_to_the_bound_than_float32_ratios_could() -> None:
    log_hi = math.log1p(EPS_HIGH)
    inside, outside = log_hi * (1 - 1e-5), log_hi * (1 + 1e-5)
    as_ratios = torch.tensor([inside, outside], dtype=torch.float32).exp()
    assert as_ratios[0] == as_ratios[1]
    flat = pack([one_sequence([inside], 1.0), one_sequence([outside], 1.0)])
    output = flat.loss(2)
    assert output.stats.clipped_high_S.tolist() == [0.0, 1.0]
    gradient = flat.gradient(output).tolist()
    assert gradient == [pytest.approx(-0.5 * (1 + EPS_HIGH)), 0.0]


def test_the_mean_over_50_000_tokens_keeps_the_digits_of_the_clip_range_in_float32() -> None:
    sequence = random_sequence(torch.Generator().manual_seed(6), [True] * 50_000, scale=0.02)
    deltas = [p - a for p, a in zip(sequence.logprobs, sequence.anchor_logprobs, strict=True)]
    log_ratio = pack([sequence]).loss(1).stats.log_ratio_S.item()
    assert log_ratio == pytest.approx(math.fsum(deltas) / len(deltas), abs=EPS_LOW / 1000)


@pytest.mark.parametrize("ratio_unit", ["sequence", "turn"])
def test_a_million_tokens_of_one_sequence_are_right_to_one_millionth(ratio_unit: RatioUnit) -> None:
    """Equal terms are the worst case of a running sum: each addition rounds in the same direction."""
    num_tokens, log_ratio, advantage = 1_000_000, 1e-4, 0.7
    logprobs_T = torch.full((num_tokens,), log_ratio).requires_grad_()
    zeros_T = torch.zeros(num_tokens, dtype=torch.int64)
    output = gspo_loss(
        logprobs_T,
        torch.zeros(num_tokens),
        torch.full((num_tokens,), advantage),
        torch.ones(num_tokens, dtype=torch.bool),
        zeros_T,
        zeros_T,
        num_sequences=1,
        clip_range=clip_range(torch.zeros(1), eps_low=EPS_LOW, eps_high=EPS_HIGH),
        ratio_unit=ratio_unit,
    )
    output.loss.backward()
    assert output.loss.item() == pytest.approx(-advantage * math.exp(log_ratio), rel=1e-6)
    assert output.stats.log_ratio_S.item() == pytest.approx(log_ratio, rel=1e-6)
    assert output.stats.advantage_S.item() == pytest.approx(advantage, rel=1e-6)
    assert logprobs_T.grad is not None
    assert logprobs_T.grad.double().sum().item() == pytest.approx(-advantage * math.exp(log_ratio), rel=1e-6)


def test_lag_widens_the_clip_range_by_one_eps_per_version() -> None:
    delta = 2.5 * math.log1p(EPS_HIGH)
    sequences = [one_sequence([delta] * 4, 1.0, lag=lag) for lag in (0.0, 1.0, 2.0)]
    assert pack(sequences).loss(3, clip_range_growth=1.0).stats.clipped_high_S.tolist() == [1.0, 1.0, 0.0]
    assert pack(sequences).loss(3, clip_range_growth=0.0).stats.clipped_high_S.tolist() == [1.0, 1.0, 1.0]


def test_the_noise_margin_shrinks_with_the_square_root_of_the_units_length() -> None:
    noise = 0.01
    sequences = [one_sequence([-(EPS_LOW + noise / 3)] * n, -1.0, turns=[0] * n) for n in (4, 16)]
    for ratio_unit in ("sequence", "turn"):
        assert pack(sequences).loss(2, ratio_unit=ratio_unit, noise=noise).stats.clipped_low_S.tolist() == [0.0, 1.0]
    assert pack(sequences).loss(2, ratio_unit="token", noise=noise).stats.clipped_low_S.tolist() == [0.0, 0.0]
    assert pack(sequences).loss(2).stats.clipped_low_S.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("mask", [[], [False, False, False]])
@pytest.mark.parametrize("ratio_unit", UNITS)
def test_a_micro_batch_without_action_tokens_gives_zero_and_a_gradient_of_zeros(
    ratio_unit: RatioUnit, mask: list[bool]
) -> None:
    flat = pack([random_sequence(torch.Generator().manual_seed(4), mask)])
    weight = torch.ones((), requires_grad=True)
    output = replace(flat, logprobs_T=flat.logprobs_T * weight).loss(16, ratio_unit=ratio_unit)
    assert output.loss.requires_grad
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert weight.grad is not None
    assert weight.grad.item() == 0.0


def test_tokens_that_are_masked_after_sampling_still_count_in_n() -> None:
    flat = pack([one_sequence([0.0, 0.0, 0.0, 0.0], 1.0)])
    flat = replace(flat, mask_T=torch.tensor([True, True, True, False]))
    paper = clip_range(flat.lag_S, eps_low=EPS_LOW, eps_high=EPS_HIGH)
    arguments = (flat.logprobs_T, flat.anchor_T, flat.advantages_T, flat.mask_T, flat.sequence_ids_T)
    full = gspo_loss(*arguments, num_sequences=1, clip_range=paper, tokens_per_sequence_S=torch.tensor([4]))
    assert full.loss.item() == pytest.approx(-0.75)
    with pytest.raises(ValueError, match=r"tokens_per_sequence_S\[0\] is 2 but mask_T has 3"):
        gspo_loss(*arguments, num_sequences=1, clip_range=paper, tokens_per_sequence_S=torch.tensor([2]))


def test_log_ratios_are_clamped_and_counted_and_the_gradient_stays_finite() -> None:
    flat = pack([one_sequence([200.0, 200.0], -1.0, anchor=-200.0), one_sequence([0.0], -1.0)])
    output = flat.loss(2)
    assert output.stats.clamped_tokens_S.tolist() == [2.0, 0.0]
    assert output.loss.item() == pytest.approx((math.exp(10.0) + 1) / 2)
    assert flat.gradient(output).tolist() == pytest.approx([math.exp(10.0) / 4] * 2 + [0.5])


def test_counting_only_the_micro_batchs_own_sequences_is_noticed_when_it_is_too_few() -> None:
    flat = pack([one_sequence([0.0], 1.0)] * 3)
    with pytest.raises(ValueError, match="num_sequences is 2 but this micro-batch alone has 3"):
        flat.loss(2)


@pytest.mark.parametrize("num_sequences", [math.nan, math.inf, 2.5])
def test_a_number_of_sequences_that_is_no_number_is_refused(num_sequences: float) -> None:
    flat = pack([one_sequence([0.0], 1.0)] * 2)
    with pytest.raises(ValueError, match=f"num_sequences is {num_sequences}; give the whole number"):
        flat.loss(num_sequences)  # type: ignore[arg-type]


def test_turn_ratios_without_turn_ids_and_clip_ranges_without_sequences_are_refused() -> None:
    flat = pack([one_sequence([0.0], 1.0)])
    arguments = (flat.logprobs_T, flat.anchor_T, flat.advantages_T, flat.mask_T, flat.sequence_ids_T)
    paper = clip_range(flat.lag_S, eps_low=EPS_LOW, eps_high=EPS_HIGH)
    with pytest.raises(ValueError, match="turn_ids_T is None"):
        gspo_loss(*arguments, num_sequences=1, clip_range=paper, ratio_unit="turn")
    with pytest.raises(ValueError, match="clip_range has 0 sequences"):
        gspo_loss(*arguments, num_sequences=1, clip_range=clip_range(torch.zeros(0), eps_low=EPS_LOW, eps_high=EPS_HIGH))


@pytest.mark.parametrize("mode", [None, "off"])
def test_the_behaviour_anchor_puts_engine_noise_into_the_clip_range_and_no_weight_on_the_sequence(
    mode: TisMode | None,
) -> None:
    flat = pack([one_sequence([0.002] * 4, 1.0, lag=1.0)])
    arguments = (flat.logprobs_T, flat.anchor_T, flat.advantages_T, flat.mask_T, flat.sequence_ids_T)
    objective = Objective(clip_range_growth=1.0, noise_z=2.0, anchor="behaviour", tis_mode=mode)
    narrow = objective_loss(objective, *arguments, lag_S=flat.lag_S, sigma=0.0, num_sequences=1)
    wide = objective_loss(objective, *arguments, lag_S=flat.lag_S, sigma=0.002, num_sequences=1)
    assert narrow.loss.item() == pytest.approx(-((1 + EPS_HIGH) ** 2), rel=1e-6)
    assert wide.loss.item() == pytest.approx(-math.exp(0.002), rel=1e-6)
    assert wide.stats.weight_S.tolist() == [1.0]
    assert wide.stats.mismatch_kl_S.item() == pytest.approx(math.expm1(0.002) - 0.002, rel=1e-2)


def test_the_clip_scale_reaches_the_clip_range_of_the_objective() -> None:
    flat = pack([one_sequence([0.002] * 4, 1.0)])
    arguments = (flat.logprobs_T, flat.anchor_T, flat.advantages_T, flat.mask_T, flat.sequence_ids_T)
    for scale, expected in ((1.0, 1 + EPS_HIGH), (2.0, (1 + EPS_HIGH) ** 2), (8.0, math.exp(0.002))):
        objective = Objective.gspo()
        output = objective_loss(objective, *arguments, lag_S=flat.lag_S, sigma=0.0, num_sequences=1, clip_scale=scale)
        assert output.loss.item() == pytest.approx(-expected, rel=1e-6)


def test_the_proximal_anchor_counts_the_mismatch_in_the_weight_and_not_in_the_ratio_or_clip_range() -> None:
    drifted, rejected, inside = ([0.05] * 4, [0.5] * 4, [0.05] * 4)
    flat = pack([one_sequence(drifted, 1.0, lag=3.0), one_sequence(rejected, 1.0), one_sequence(inside, 1.0)])
    proximal_T = flat.logprobs_T.detach() - torch.tensor([0.001] * 4 + [0.0] * 4 + [0.0002] * 4)
    arguments = (flat.logprobs_T, flat.anchor_T, flat.advantages_T, flat.mask_T, flat.sequence_ids_T)
    objective = Objective(anchor="proximal", tis_mode="reject", tis_cap=1.2, clip_range_growth=5.0, noise_z=3.0)
    output = objective_loss(
        objective,
        *arguments,
        lag_S=flat.lag_S,
        sigma=1.0,
        num_sequences=3,
        proximal_logprobs_T=proximal_T,
        entropy_T=torch.tensor([1.0] * 4 + [2.0] * 4 + [3.0] * 4),
        group_ids_S=torch.tensor([5, 6, 6]),
    )
    assert output.stats.weight_S.tolist() == pytest.approx([math.exp(0.049), 0.0, math.exp(0.0498)], rel=1e-5)
    assert output.stats.clipped_high_S.tolist() == [1.0, 0.0, 0.0]
    expected = [math.exp(0.049) * (1 + EPS_HIGH), 0.0, math.exp(0.0498) * math.exp(0.0002)]
    assert output.stats.objective_S.tolist() == pytest.approx(expected, rel=1e-6)
    assert output.loss.item() == pytest.approx(-sum(expected) / 3, rel=1e-6)
    assert output.stats.mismatch_kl_S[0].item() == pytest.approx(math.expm1(0.049) - 0.049, rel=1e-3)
    assert output.stats.entropy_S.tolist() == [1.0, 2.0, 3.0]
    assert output.stats.group_S.tolist() == [5, 6, 6]


def test_proximal_log_probs_are_asked_for_exactly_where_they_are_used() -> None:
    flat = pack([one_sequence([0.0], 1.0)])
    arguments = (flat.logprobs_T, flat.anchor_T, flat.advantages_T, flat.mask_T, flat.sequence_ids_T)
    with pytest.raises(ValueError, match="proximal_logprobs_T is missing with anchor 'proximal'"):
        objective_loss(Objective(anchor="proximal"), *arguments, lag_S=flat.lag_S, sigma=0.0, num_sequences=1)
    with pytest.raises(ValueError, match="proximal_logprobs_T is given with anchor 'behaviour'"):
        objective_loss(
            Objective.gspo(), *arguments, lag_S=flat.lag_S, sigma=0.0, num_sequences=1, proximal_logprobs_T=flat.anchor_T
        )
