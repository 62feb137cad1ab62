"""The loss against its float64 reference and against the formulas of GSPO and GRPO; layout, splits and refusals."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.loss import gspo_loss, objective_loss
from gspo.reference import ReferenceSequence, reference_loss
from gspo.settings import Objective, RatioUnit
from gspo.staleness import clip_band
from tests.support.loss_cases import EPS_HIGH, EPS_LOW, one_sequence, pack, pad, random_sequence

UNITS: tuple[RatioUnit, ...] = ("sequence", "turn", "token")


@st.composite
def step_sequences(draw: st.DrawFn) -> list[ReferenceSequence]:
    """The sequences of a small optimizer step: any lengths (also 0), masks, lags and weights."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    masks = draw(st.lists(st.lists(st.booleans(), max_size=12), min_size=1, max_size=6))
    return [
        random_sequence(
            generator,
            mask,
            lag=draw(st.sampled_from([0.0, 0.5, 1.0, 3.25])),
            weight=draw(st.sampled_from([0.0, 0.75, 1.0, 1.0625])),
        )
        for mask in masks
    ]


@pytest.mark.parametrize("ratio_unit", UNITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(sequences=step_sequences(), noise=st.sampled_from([0.0, 1e-3]))
@settings(max_examples=60, deadline=None)
def test_loss_and_gradient_are_those_of_the_reference(
    ratio_unit: RatioUnit, dtype: torch.dtype, sequences: list[ReferenceSequence], noise: float
) -> None:
    flat = pack(sequences, dtype)
    output = flat.loss(9, ratio_unit=ratio_unit, band_growth=1.5, noise=noise)
    expected = reference_loss(
        sequences,
        num_sequences=9,
        eps_low=EPS_LOW,
        eps_high=EPS_HIGH,
        band_growth=1.5,
        noise=noise,
        ratio_unit=ratio_unit,
    )
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    assert output.loss.item() == pytest.approx(expected.loss, rel=tolerance, abs=tolerance)
    flat_gradient = torch.tensor([g for row in expected.gradients for g in row], dtype=dtype)
    torch.testing.assert_close(flat.gradient(output), flat_gradient, rtol=tolerance, atol=1e-9)
    for i, row in enumerate(expected.clipped):
        num_tokens = max(sum(sequences[i].mask), 1)
        assert output.stats.clipped_high_S[i].item() == pytest.approx(row.count(1) / num_tokens)
        assert output.stats.clipped_low_S[i].item() == pytest.approx(row.count(-1) / num_tokens)


def test_the_random_sequences_of_these_tests_are_clipped_on_both_sides_and_not_everywhere() -> None:
    generator = torch.Generator().manual_seed(0)
    sequences = [random_sequence(generator, [True] * 8) for _ in range(200)]
    for ratio_unit in UNITS:
        stats = pack(sequences).loss(200, ratio_unit=ratio_unit).stats
        assert 0.1 < stats.clipped_high_S.mean().item() < 0.45
        assert 0.1 < stats.clipped_low_S.mean().item() < 0.45


@pytest.mark.parametrize("ratio_unit", UNITS)
@given(sequences=step_sequences())
@settings(max_examples=40, deadline=None)
def test_packed_and_padded_layouts_give_the_same_bits(ratio_unit: RatioUnit, sequences: list[ReferenceSequence]) -> None:
    packed, padded = pack(sequences), pad(sequences)
    packed_output = packed.loss(8, ratio_unit=ratio_unit, noise=1e-4)
    padded_output = padded.loss(8, ratio_unit=ratio_unit, noise=1e-4)
    assert torch.equal(packed_output.loss, padded_output.loss)
    padded_gradient_T = padded.gradient(padded_output)
    inside_T = padded.sequence_ids_T >= 0
    assert torch.equal(packed.gradient(packed_output), padded_gradient_T[inside_T])
    assert padded_gradient_T[~inside_T].abs().sum().item() == 0.0


@pytest.mark.parametrize("ratio_unit", UNITS)
@given(sequences=step_sequences(), data=st.data())
@settings(max_examples=40, deadline=None)
def test_the_losses_of_any_micro_batch_split_add_up_to_that_of_the_step(
    ratio_unit: RatioUnit, sequences: list[ReferenceSequence], data: st.DataObject
) -> None:
    whole = pack(sequences, torch.float64)
    whole_output = whole.loss(len(sequences), ratio_unit=ratio_unit, band_growth=1.0)
    bins = data.draw(st.lists(st.integers(0, 2), min_size=len(sequences), max_size=len(sequences)))
    total, gradients = 0.0, {}
    for chosen in range(3):
        members = [i for i in range(len(sequences)) if bins[i] == chosen]
        if not members:
            continue
        part = pack([sequences[i] for i in members], torch.float64)
        output = part.loss(len(sequences), ratio_unit=ratio_unit, band_growth=1.0)
        total += output.loss.item()
        lengths = [len(sequences[i].mask) for i in members]
        gradients |= dict(zip(members, part.gradient(output).split(lengths), strict=True))
    assert total == pytest.approx(whole_output.loss.item(), rel=1e-12, abs=1e-14)
    joined = torch.cat([gradients[i] for i in range(len(sequences))])
    torch.testing.assert_close(joined, whole.gradient(whole_output), rtol=1e-12, atol=0)


def test_with_one_advantage_per_sequence_it_is_gspo_in_value_clip_decision_and_gradient() -> None:
    generator = torch.Generator().manual_seed(1)
    lengths = [3, 1, 7, 40, 12, 5] * 10
    sequences = [random_sequence(generator, [True] * n, per_token_advantages=False) for n in lengths]
    flat = pack(sequences, torch.float64)
    output = flat.loss(len(sequences))

    logprobs = [torch.tensor(s.logprobs, dtype=torch.float64, requires_grad=True) for s in sequences]
    terms, clipped = [], []
    for i, sequence in enumerate(sequences):
        ratio = torch.exp((logprobs[i] - torch.tensor(sequence.anchor_logprobs, dtype=torch.float64)).mean())
        advantage = sequence.advantages[0]
        bounded = torch.clamp(ratio, 1 - EPS_LOW, 1 + EPS_HIGH)
        terms.append(torch.minimum(ratio * advantage, bounded * advantage))
        clipped.append((bounded * advantage < ratio * advantage).item())
    gspo = -torch.stack(terms).mean()
    gspo_gradient = torch.cat(torch.autograd.grad(gspo, logprobs))

    assert 0 < sum(clipped) < len(clipped)
    assert output.loss.item() == pytest.approx(gspo.item(), rel=1e-12)
    assert (output.stats.clipped_high_S + output.stats.clipped_low_S).tolist() == [float(c) for c in clipped]
    torch.testing.assert_close(flat.gradient(output), gspo_gradient, rtol=1e-9, atol=1e-15)


def test_with_token_ratios_it_is_grpo() -> None:
    generator = torch.Generator().manual_seed(2)
    sequences = [random_sequence(generator, [True] * n, scale=0.3) for n in (4, 9, 2, 30)]
    flat = pack(sequences, torch.float64)
    output = flat.loss(4, ratio_unit="token", eps_low=0.2, eps_high=0.27)

    logprobs_T = flat.logprobs_T.detach().clone().requires_grad_()
    ratio_T = torch.exp(logprobs_T - flat.anchor_T)
    terms_T = torch.minimum(ratio_T * flat.advantages_T, ratio_T.clamp(1 - 0.2, 1 + 0.27) * flat.advantages_T)
    grpo = -torch.stack([part.mean() for part in terms_T.split([4, 9, 2, 30])]).mean()
    (grpo_gradient_T,) = torch.autograd.grad(grpo, logprobs_T)

    assert 0 < output.stats.clipped_high_S.sum().item() + output.stats.clipped_low_S.sum().item() < 4
    assert output.loss.item() == pytest.approx(grpo.item(), rel=1e-12)
    torch.testing.assert_close(flat.gradient(output), grpo_gradient_T, rtol=1e-9, atol=1e-15)


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


def test_lag_widens_the_band_by_one_eps_per_version() -> None:
    delta = 2.5 * math.log1p(EPS_HIGH)
    sequences = [one_sequence([delta] * 4, 1.0, lag=lag) for lag in (0.0, 1.0, 2.0)]
    assert pack(sequences).loss(3, band_growth=1.0).stats.clipped_high_S.tolist() == [1.0, 1.0, 0.0]
    assert pack(sequences).loss(3, band_growth=0.0).stats.clipped_high_S.tolist() == [1.0, 1.0, 1.0]


def test_the_noise_floor_shrinks_with_the_square_root_of_the_units_length() -> None:
    noise = 0.01
    sequences = [one_sequence([-(EPS_LOW + noise / 3)] * n, -1.0, turns=[0] * n) for n in (4, 16)]
    for ratio_unit in ("sequence", "turn"):
        assert pack(sequences).loss(2, ratio_unit=ratio_unit, noise=noise).stats.clipped_low_S.tolist() == [0.0, 1.0]
    assert pack(sequences).loss(2, ratio_unit="token", noise=noise).stats.clipped_low_S.tolist() == [0.0, 0.0]
    assert pack(sequences).loss(2).stats.clipped_low_S.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("ratio_unit", UNITS)
def test_empty_and_fully_masked_sequences_add_exactly_zero(ratio_unit: RatioUnit) -> None:
    generator = torch.Generator().manual_seed(3)
    real = random_sequence(generator, [True, False, True])
    masked = replace(random_sequence(generator, [False] * 4), logprobs=[float("nan")] * 4)
    empty = random_sequence(generator, [])
    alone, together = pack([real]), pack([empty, masked, real, empty])
    alone_output, together_output = alone.loss(4, ratio_unit=ratio_unit), together.loss(4, ratio_unit=ratio_unit)
    assert torch.equal(together_output.loss, alone_output.loss)
    gradient_T = together.gradient(together_output)
    assert gradient_T[:4].tolist() == [0.0] * 4
    assert torch.equal(gradient_T[4:], alone.gradient(alone_output))
    assert together_output.stats.objective_S[[0, 1, 3]].tolist() == [0.0, 0.0, 0.0]


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


def test_rejection_changes_neither_token_counts_nor_the_number_of_sequences() -> None:
    generator = torch.Generator().manual_seed(5)
    kept = random_sequence(generator, [True] * 6)
    other = random_sequence(generator, [True] * 3)
    both = pack([kept, other]).loss(2)
    one = pack([kept, replace(other, weight=0.0)]).loss(2)
    assert one.loss.item() == pytest.approx(-both.stats.objective_S[0].item() / 2)
    assert one.stats.num_tokens_S.tolist() == [6.0, 3.0]
    assert one.stats.rejected_S.tolist() == [False, True]
    assert one.stats.objective_S[1].item() == 0.0


def test_tokens_that_are_masked_after_sampling_still_count_in_n() -> None:
    flat = pack([one_sequence([0.0, 0.0, 0.0, 0.0], 1.0)])
    flat = replace(flat, mask_T=torch.tensor([True, True, True, False]))
    band = clip_band(flat.lag_S, eps_low=EPS_LOW, eps_high=EPS_HIGH)
    arguments = (flat.logprobs_T, flat.anchor_T, flat.advantages_T, flat.mask_T, flat.sequence_ids_T)
    full = gspo_loss(*arguments, num_sequences=1, band=band, tokens_per_sequence_S=torch.tensor([4]))
    assert full.loss.item() == pytest.approx(-0.75)
    with pytest.raises(ValueError, match=r"tokens_per_sequence_S\[0\] is 2 but mask_T has 3"):
        gspo_loss(*arguments, num_sequences=1, band=band, tokens_per_sequence_S=torch.tensor([2]))


def test_log_ratios_are_clamped_and_counted_and_the_gradient_stays_finite() -> None:
    flat = pack([one_sequence([200.0, 200.0], -1.0, anchor=-200.0), one_sequence([0.0], -1.0)])
    output = flat.loss(2)
    assert output.stats.clamped_tokens_S.tolist() == [2.0, 0.0]
    assert output.loss.item() == pytest.approx((math.exp(10.0) + 1) / 2)
    assert flat.gradient(output).tolist() == pytest.approx([math.exp(10.0) / 4] * 2 + [0.5])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["logprobs_T", "anchor_T"])
def test_half_precision_log_probs_are_refused(name: str, dtype: torch.dtype) -> None:
    flat = pack([one_sequence([0.0], 1.0)])
    broken = replace(flat, **{name: getattr(flat, name).detach().to(dtype)})
    with pytest.raises(ValueError, match=r"logprobs_T is torch\.(b?float16); give float32"):
        broken.loss(1)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("logprobs_T", torch.tensor([0.0, float("nan")]), r"^logprobs_T\[1\] is nan"),
        ("anchor_T", torch.tensor([float("-inf"), 0.0]), r"^anchor_logprobs_T\[0\] is -inf"),
        ("advantages_T", torch.tensor([0.0, float("inf")]), r"^advantages_T\[1\] is inf"),
        ("advantages_T", torch.tensor([0.0]), r"^advantages_T has 1 elements where 2 are needed"),
        ("mask_T", torch.tensor([1.0, 1.0]), r"^mask_T is torch\.float32"),
        ("sequence_ids_T", torch.tensor([0, 1]), r"^sequence_ids_T\[1\] is 1; ids lie in \[0, 1\)"),
        ("sequence_ids_T", torch.tensor([-1, 0]), r"^sequence_ids_T\[0\] is -1"),
        ("sequence_ids_T", torch.tensor([0.0, 0.0]), r"^sequence_ids_T is torch\.float32"),
        ("turn_ids_T", torch.tensor([0, -2]), r"^turn_ids_T\[1\] is -2"),
        ("weights_S", torch.tensor([-0.5]), r"^mismatch_weights_S\[0\] is -0\.5"),
        ("weights_S", torch.tensor([float("nan")]), r"^mismatch_weights_S\[0\] is nan"),
        ("logprobs_T", torch.zeros(1, 2), r"^logprobs_T has shape \(1, 2\)"),
    ],
)
def test_a_wrong_argument_is_named_with_its_index_and_value(name: str, value: torch.Tensor, message: str) -> None:
    flat = pack([one_sequence([0.0, 0.0], 1.0)])
    with pytest.raises(ValueError, match=message):
        replace(flat, **{name: value}).loss(1, ratio_unit="turn")


def test_counting_only_the_micro_batchs_own_sequences_is_noticed_when_it_is_too_few() -> None:
    flat = pack([one_sequence([0.0], 1.0)] * 3)
    with pytest.raises(ValueError, match="num_sequences is 2 but this micro-batch alone has 3"):
        flat.loss(2)


def test_turn_ratios_without_turn_ids_and_bands_without_sequences_are_refused() -> None:
    flat = pack([one_sequence([0.0], 1.0)])
    arguments = (flat.logprobs_T, flat.anchor_T, flat.advantages_T, flat.mask_T, flat.sequence_ids_T)
    band = clip_band(flat.lag_S, eps_low=EPS_LOW, eps_high=EPS_HIGH)
    with pytest.raises(ValueError, match="turn_ids_T is None"):
        gspo_loss(*arguments, num_sequences=1, band=band, ratio_unit="turn")
    with pytest.raises(ValueError, match="band has 0 sequences"):
        gspo_loss(*arguments, num_sequences=1, band=clip_band(torch.zeros(0), eps_low=EPS_LOW, eps_high=EPS_HIGH))


def test_the_behaviour_anchor_puts_engine_noise_into_the_band_and_no_weight_on_the_sequence() -> None:
    flat = pack([one_sequence([0.002] * 4, 1.0, lag=1.0)])
    arguments = (flat.logprobs_T, flat.anchor_T, flat.advantages_T, flat.mask_T, flat.sequence_ids_T)
    objective = Objective(band_growth=1.0, noise_z=2.0)
    narrow = objective_loss(objective, *arguments, lag_S=flat.lag_S, sigma=0.0, num_sequences=1)
    wide = objective_loss(objective, *arguments, lag_S=flat.lag_S, sigma=0.002, num_sequences=1)
    assert narrow.loss.item() == pytest.approx(-((1 + EPS_HIGH) ** 2), rel=1e-6)
    assert wide.loss.item() == pytest.approx(-math.exp(0.002), rel=1e-6)
    assert wide.stats.weight_S.tolist() == [1.0]
    assert wide.stats.mismatch_kl_S.item() == pytest.approx(math.expm1(0.002) - 0.002, rel=1e-2)


def test_the_clip_scale_reaches_the_band_of_the_objective() -> None:
    flat = pack([one_sequence([0.002] * 4, 1.0)])
    arguments = (flat.logprobs_T, flat.anchor_T, flat.advantages_T, flat.mask_T, flat.sequence_ids_T)
    for scale, expected in ((1.0, 1 + EPS_HIGH), (2.0, (1 + EPS_HIGH) ** 2), (8.0, math.exp(0.002))):
        output = objective_loss(Objective(), *arguments, lag_S=flat.lag_S, sigma=0.0, num_sequences=1, clip_scale=scale)
        assert output.loss.item() == pytest.approx(-expected, rel=1e-6)


def test_the_proximal_anchor_counts_the_mismatch_in_the_weight_and_not_in_the_ratio_or_band() -> None:
    drifted, rejected, inside = ([0.05] * 4, [0.5] * 4, [0.05] * 4)
    flat = pack([one_sequence(drifted, 1.0, lag=3.0), one_sequence(rejected, 1.0), one_sequence(inside, 1.0)])
    proximal_T = flat.logprobs_T.detach() - torch.tensor([0.001] * 4 + [0.0] * 4 + [0.0002] * 4)
    arguments = (flat.logprobs_T, flat.anchor_T, flat.advantages_T, flat.mask_T, flat.sequence_ids_T)
    objective = Objective(anchor="proximal", mismatch_mode="reject", mismatch_cap=1.2, band_growth=5.0, noise_z=3.0)
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
            Objective(), *arguments, lag_S=flat.lag_S, sigma=0.0, num_sequences=1, proximal_logprobs_T=flat.anchor_T
        )
