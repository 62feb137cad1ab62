"""Lag, the clip range, the running sigma, mismatch weights and segment means."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.inputs.units import numbered, ratio_units, segment_mean
from gspo.loss import gspo_loss
from gspo.mismatch import MismatchMoments, MismatchTracker, mismatch_kl, mismatch_moments, mismatch_weights
from gspo.settings import Objective
from gspo.staleness import clip_range, objective_clip_range, sequence_lag


def test_the_lag_of_a_million_tokens_is_their_mean() -> None:
    versions_T = torch.full((1_000_000,), 1000 - 63)
    zeros_T = torch.zeros_like(versions_T)
    lag_S = sequence_lag(1000, versions_T, torch.ones_like(versions_T, dtype=torch.bool), zeros_T, 1)
    assert lag_S.item() == 63.0


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_a_lag_in_integers_is_the_same_lag(dtype: torch.dtype) -> None:
    lag_S = torch.tensor([0, 1, 3], dtype=dtype)
    bounds = [clip_range(lag, eps_low=3e-4, eps_high=4e-4, clip_range_growth=1.5) for lag in (lag_S, lag_S.float())]
    assert torch.equal(bounds[0].log_hi_S, bounds[1].log_hi_S)
    assert torch.equal(bounds[0].log_lo_S, bounds[1].log_lo_S)
    assert bounds[0].lag_S.dtype == torch.float32


def test_a_diagnostic_and_a_weight_have_no_graph_even_if_the_engines_log_probs_do() -> None:
    behaviour_T = torch.tensor([-1.0, -2.0], requires_grad=True)
    learner_T = torch.tensor([-1.1, -2.1], requires_grad=True)
    place = torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64), 1
    assert not mismatch_kl(learner_T, behaviour_T, *place).requires_grad
    assert not mismatch_weights(learner_T, behaviour_T, *place, mode="truncate", cap=1.1).weights_S.requires_grad


@given(
    rows=st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.floats(-5, 5, width=32)), max_size=40),
)
@settings(max_examples=50, deadline=None)
def test_a_segment_mean_is_the_mean_of_the_masked_values_and_zero_without_any(
    rows: list[tuple[int, bool, float]],
) -> None:
    ids_T = torch.tensor([row[0] for row in rows], dtype=torch.int64)
    mask_T = torch.tensor([row[1] for row in rows], dtype=torch.bool)
    values_T = torch.tensor([row[2] for row in rows], dtype=torch.float32)
    means = segment_mean(torch.where(mask_T, values_T, float("nan")), mask_T, ids_T, 5)
    for segment in range(5):
        chosen = [value for i, kept, value in rows if i == segment and kept]
        expected = math.fsum(chosen) / len(chosen) if chosen else 0.0
        assert means[segment].item() == pytest.approx(expected, abs=1e-5)


def test_turns_are_pairs_of_sequence_and_turn_id() -> None:
    sequence_ids_T, turn_ids_T = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([0, 0, 7, 0, 7, 7], dtype=torch.int32)
    units = ratio_units("turn", sequence_ids_T, turn_ids_T, num_sequences=2)
    # As many units as tokens: the last two have none.
    assert (units.ids_T.tolist(), units.sequence_ids_U.tolist()) == ([0, 0, 1, 2, 3, 3], [0, 0, 1, 1, 0, 0])


def test_keys_are_numbered_as_torch_unique_numbers_them() -> None:
    keys = torch.randint(-50, 50, (300,), generator=torch.Generator().manual_seed(0))
    assert numbered(keys).tolist() == torch.unique(keys, return_inverse=True)[1].tolist()
    assert numbered(keys[:0]).tolist() == []


def test_a_sequences_lag_is_the_mean_over_its_action_tokens() -> None:
    versions_T = torch.tensor([7, 7, 6, 5, -1, 99, 10])
    mask_T = torch.tensor([True, True, True, True, False, False, True])
    ids_T = torch.tensor([0, 0, 1, 1, 1, 3, 2])
    assert sequence_lag(10, versions_T, mask_T, ids_T, 4).tolist() == [3.0, 4.5, 0.0, 0.0]


def test_a_token_newer_than_the_learner_is_refused() -> None:
    with pytest.raises(ValueError, match=r"versions_T\[1\] is 11 but policy_version is 10"):
        sequence_lag(10, torch.tensor([10, 11]), torch.tensor([True, True]), torch.tensor([0, 0]), 1)


def test_vectors_of_another_length_are_refused_before_they_broadcast() -> None:
    versions_T, mask_T = torch.tensor([7, 7]), torch.tensor([True, True])
    with pytest.raises(ValueError, match="mask_T has 1 elements where 2 are needed"):
        sequence_lag(10, versions_T, mask_T[:1], torch.tensor([0, 0]), 1)
    with pytest.raises(ValueError, match="sequence_ids_T has 3 elements where 2 are needed"):
        sequence_lag(10, versions_T, mask_T, torch.tensor([0, 0, 0]), 1)


def test_large_version_numbers_keep_their_difference() -> None:
    newest = 2**53
    lag_S = sequence_lag(newest, torch.tensor([newest - 1]), torch.tensor([True]), torch.tensor([0]), 1)
    assert lag_S.tolist() == [1.0]


def test_at_lag_zero_without_noise_the_clip_range_is_the_papers_clip() -> None:
    clip = objective_clip_range(
        Objective(clip_range_growth=3.0, noise_z=2.0, anchor="behaviour", tis_mode="off"),
        torch.zeros(2, dtype=torch.float64),
        sigma=0.0,
    )
    log_lo, log_hi = clip.bounds(torch.tensor([0, 1, 1]), torch.tensor([1.0, 5.0, 1000.0]))
    assert log_lo.exp().tolist() == pytest.approx([1 - 3e-4] * 3, rel=1e-15)
    assert log_hi.exp().tolist() == pytest.approx([1 + 4e-4] * 3, rel=1e-15)


def test_the_clip_range_grows_with_lag_and_noise_as_documented() -> None:
    clip = clip_range(
        torch.tensor([2.0], dtype=torch.float64), eps_low=0.1, eps_high=0.2, clip_range_growth=0.5, noise_z=3.0, sigma=0.02
    )
    log_lo, log_hi = clip.bounds(torch.tensor([0]), torch.tensor([9.0]))
    assert log_lo.item() == pytest.approx(2.0 * math.log(0.9) - 0.02)
    assert log_hi.item() == pytest.approx(2.0 * math.log(1.2) + 0.02)


def test_a_negative_growth_tightens_the_clip_range_of_old_sequences_and_never_inverts_it() -> None:
    lag_S = torch.tensor([0.0, 1.0, 3.0, 1e6], dtype=torch.float64)
    clip = clip_range(lag_S, eps_low=0.1, eps_high=0.2, clip_range_growth=-2.0)
    growth = [1.0, 1 / 3, 1 / 7, 1 / (1 + 2e6)]
    assert clip.log_lo_S.tolist() == pytest.approx([g * math.log(0.9) for g in growth])
    assert clip.log_hi_S.tolist() == pytest.approx([g * math.log(1.2) for g in growth])


def test_the_adaptive_scale_widens_the_clip_and_not_the_noise_margin() -> None:
    objective = Objective(clip_range_growth=0.5, noise_z=3.0, anchor="behaviour", tis_mode="off")
    lag_S = torch.tensor([2.0], dtype=torch.float64)
    log_lo, log_hi = objective_clip_range(objective, lag_S, 0.02, scale=4.0).bounds(torch.tensor([0]), torch.tensor([9.0]))
    assert log_lo.item() == pytest.approx(4.0 * 2.0 * math.log(1 - 3e-4) - 0.02)
    assert log_hi.item() == pytest.approx(4.0 * 2.0 * math.log(1 + 4e-4) + 0.02)


def test_a_proximal_anchor_needs_neither_growth_nor_a_noise_margin() -> None:
    objective = Objective(anchor="proximal", clip_range_growth=3.0, noise_z=2.0)
    clip = objective_clip_range(objective, torch.tensor([4.0], dtype=torch.float64), sigma=0.5)
    log_lo, log_hi = clip.bounds(torch.tensor([0]), torch.tensor([4.0]))
    assert (log_lo.item(), log_hi.item()) == (math.log1p(-3e-4), math.log1p(4e-4))


@pytest.mark.parametrize(
    ("lag", "arguments", "message"),
    [
        ([0.0, -1.0], {}, r"lag_S\[1\] is -1\.0"),
        ([float("nan")], {}, r"lag_S\[0\] is nan"),
        ([0.0], {"sigma": float("nan")}, "sigma is nan"),
        ([0.0], {"eps_low": 1.5}, "eps_low is 1.5"),
        ([0.0], {"noise_z": -1.0}, "noise_z is -1.0"),
        ([0.0], {"scale": 0.0}, "scale is 0.0"),
        ([0.0], {"clip_range_growth": float("nan")}, "clip_range_growth is nan"),
    ],
)
def test_a_clip_range_of_impossible_values_is_refused(lag: list[float], arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        clip_range(torch.tensor(lag), **{"eps_low": 3e-4, "eps_high": 4e-4, **arguments})


def test_moments_are_measured_on_fresh_action_tokens_only_and_add_up() -> None:
    generator = np.random.default_rng(0)
    noise = generator.normal(0.01, 0.02, size=1000).astype(np.float32)
    learner_T = torch.zeros(1000) + torch.from_numpy(noise)
    mask_T = torch.from_numpy(generator.random(1000) < 0.8)
    versions_T = torch.from_numpy(generator.integers(3, 5, size=1000))
    learner_T[~mask_T], learner_T[mask_T & (versions_T == 3)] = float("nan"), 1e6
    expected = noise[(mask_T & (versions_T == 4)).numpy()].astype(np.float64)

    whole = mismatch_moments(learner_T, torch.zeros(1000), mask_T, versions_T, 4)
    parts = [
        mismatch_moments(learner_T[s], torch.zeros(1000)[s], mask_T[s], versions_T[s], 4)
        for s in (slice(0, 300), slice(300, 1000))
    ]
    reduced = MismatchMoments.from_tensor(parts[0].as_tensor() + parts[1].as_tensor())
    assert whole.count == len(expected)
    assert whole.variance == pytest.approx(expected.var(), rel=1e-9)
    assert (parts[0] + parts[1]).variance == pytest.approx(whole.variance, rel=1e-12)
    assert reduced == parts[0] + parts[1]


def moments_of(sigma: float, count: float = 100.0, mean: float = 0.3) -> MismatchMoments:
    return MismatchMoments(count, count * mean, count * (sigma**2 + mean**2))


def test_sigma_is_zero_until_measured_then_the_first_batchs_then_an_average() -> None:
    tracker = MismatchTracker(decay=0.75)
    assert tracker.sigma == 0.0
    tracker.update(moments_of(0.02))
    assert tracker.sigma == pytest.approx(0.02)
    tracker.update(moments_of(0.04))
    assert tracker.sigma == pytest.approx(math.sqrt(0.75 * 0.02**2 + 0.25 * 0.04**2))


def test_a_batch_without_fresh_tokens_changes_nothing() -> None:
    tracker = MismatchTracker()
    tracker.update(moments_of(0.02))
    before = tracker.state_dict()
    tracker.update(MismatchMoments(0.0, 0.0, 0.0))
    tracker.update(MismatchMoments(1.0, 0.5, 0.25))
    assert tracker.state_dict() == before


def test_the_tracker_continues_from_its_state() -> None:
    first, second = MismatchTracker(), MismatchTracker()
    first.update(moments_of(0.02))
    second.load_state_dict(first.state_dict())
    for tracker in (first, second):
        tracker.update(moments_of(0.06))
    assert second.sigma == first.sigma


def test_impossible_states_and_moments_are_refused() -> None:
    tracker = MismatchTracker()
    with pytest.raises(ValueError, match=r"variance is -1\.0"):
        tracker.load_state_dict({"variance": -1.0, "num_updates": 1.0})
    with pytest.raises(ValueError, match="state has keys"):
        tracker.load_state_dict({"variance": 1.0})
    with pytest.raises(ValueError, match="give finite ones"):
        tracker.update(MismatchMoments(2.0, float("nan"), 1.0))
    with pytest.raises(ValueError, match=r"decay is 1\.0"):
        MismatchTracker(decay=1.0)


def weights_of(mode: str, mean_logs: list[float]) -> tuple[list[float], list[bool]]:
    proximal_T = torch.tensor([x + d for x in mean_logs for d in (-0.5, 0.5)], dtype=torch.float64) - 2.0
    behaviour_T = torch.full_like(proximal_T, -2.0)
    ids_T = torch.arange(len(mean_logs)).repeat_interleave(2)
    weights = mismatch_weights(
        proximal_T,
        behaviour_T,
        torch.ones_like(ids_T, dtype=torch.bool),
        ids_T,
        len(mean_logs) + 1,
        mode=mode,  # type: ignore[arg-type]
        cap=1.25,
    )
    return weights.weights_S.tolist(), weights.rejected_S.tolist()


def test_truncation_bounds_the_exponential_of_the_mean_from_above_only() -> None:
    weights, rejected = weights_of("truncate", [0.1, 0.3, -0.3])
    assert weights == pytest.approx([math.exp(0.1), 1.25, math.exp(-0.3), 1.0])
    assert not any(rejected)


def test_rejection_takes_both_sides_of_the_cap_and_keeps_the_weights_between() -> None:
    weights, rejected = weights_of("reject", [0.1, 0.3, -0.3, -0.2])
    assert weights == pytest.approx([math.exp(0.1), 0.0, 0.0, math.exp(-0.2), 1.0])
    assert rejected == [False, True, True, False, False]


def test_without_a_mode_every_weight_is_one_and_an_unknown_mode_is_refused() -> None:
    assert weights_of("off", [0.3, -9.0]) == ([1.0, 1.0, 1.0], [False, False, False])
    with pytest.raises(ValueError, match="mode is 'clip'"):
        weights_of("clip", [0.0])


def test_a_missing_behaviour_log_prob_is_named() -> None:
    mask_T, ids_T = torch.tensor([True, True]), torch.tensor([0, 0])
    with pytest.raises(ValueError, match=r"behaviour_logprobs_T\[1\] is nan"):
        mismatch_weights(torch.zeros(2), torch.tensor([0.0, float("nan")]), mask_T, ids_T, 1, mode="reject", cap=1.1)


def test_the_mismatch_kl_estimates_the_divergence_of_two_distributions() -> None:
    generator = torch.Generator().manual_seed(0)
    behaviour = torch.log_softmax(torch.randn(50, generator=generator), 0)
    learner = torch.log_softmax(behaviour + 0.3 * torch.randn(50, generator=generator), 0)
    exact = (behaviour.exp() * (behaviour - learner)).sum().item()
    tokens_T = torch.multinomial(behaviour.exp(), 20_000, replacement=True, generator=generator)
    mask_T = torch.ones(20_000, dtype=torch.bool)
    ids_T = torch.zeros(20_000, dtype=torch.int64)
    kl = mismatch_kl(learner[tokens_T], behaviour[tokens_T], mask_T, ids_T, 1).item()
    assert kl == pytest.approx(exact, rel=0.05)


@given(seed=st.integers(0, 1000), growth=st.floats(0, 3))
@settings(max_examples=25, deadline=None)
def test_an_anchor_interpolated_by_lag_is_the_behaviour_anchor_with_a_range_that_grows(seed: int, growth: float) -> None:
    """A-3PO (arXiv 2512.06547): log pi_prox = alpha log mu + (1 - alpha) log pi_theta, here with alpha = 1 / (1 + c d)."""
    generator = torch.Generator().manual_seed(seed)
    lag_S, length = torch.arange(8.0).repeat(32), 3
    ids_T = torch.arange(len(lag_S)).repeat_interleave(length)
    behaviour_T = -torch.rand(len(ids_T), generator=generator, dtype=torch.float64) - 0.5
    step_S = 2e-3 * torch.randn(len(lag_S), generator=generator, dtype=torch.float64)
    advantages_T = torch.randn(len(lag_S), generator=generator, dtype=torch.float64)[ids_T]
    place = advantages_T, torch.ones(len(ids_T), dtype=torch.bool), ids_T

    def gradient(anchor_T: torch.Tensor, growth: float, weights_S: torch.Tensor | None) -> torch.Tensor:
        logprobs_T = (behaviour_T + step_S[ids_T]).requires_grad_()
        wide = clip_range(lag_S.double(), eps_low=3e-4, eps_high=4e-4, clip_range_growth=growth)
        output = gspo_loss(
            logprobs_T, anchor_T, *place, num_sequences=len(lag_S), clip_range=wide, mismatch_weights_S=weights_S
        )
        output.loss.backward()
        assert logprobs_T.grad is not None
        return logprobs_T.grad

    alpha_S = 1 / (1 + growth * lag_S.double())
    interpolated_T = behaviour_T + (1 - alpha_S)[ids_T] * step_S[ids_T]
    expected = gradient(behaviour_T, growth, None)
    assert torch.allclose(gradient(interpolated_T, 0.0, ((1 - alpha_S) * step_S).exp()), expected, rtol=1e-9, atol=0)
    assert 0 < int((expected == 0).sum()) < len(expected)
