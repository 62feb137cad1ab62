"""The clip range that follows what was measured for each lag."""

import math
import random
from dataclasses import replace
from statistics import fmean, variance

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.adaptive import AdaptiveClip
from gspo.calibration import Calibration, LagCalibration, Measured, measured_sequences
from gspo.diagnostics import signal_clip_fraction, summarise
from gspo.loss import LossOutput, objective_loss
from gspo.mismatch import MismatchTracker, mismatch_moments, sequence_mismatch
from gspo.options.ess_rate import ess_rate_scale
from gspo.settings import Objective
from gspo.staleness import calibrated_clip_range, clip_range, objective_clip_range
from gspo_protocol.limits import MIN_LOGPROB

EPS = {"eps_low": 3e-4, "eps_high": 4e-4}
DRIFT = Calibration(*torch.tensor([[0.0, -0.01], [0.0, 0.0009], [0.0, 0.04]], dtype=torch.float64))
"""Nothing at lag 0; at lag 1 a location, a deviation of 0.03 between sequences and of 0.2 of a token."""
WIDEN = Objective(anchor="behaviour", clip_calibration="widen")


def bounds(calibration: Calibration, lag: float, num_tokens: float, **options: float | bool) -> tuple[float, float]:
    clip = calibrated_clip_range(torch.tensor([lag], dtype=torch.float64), calibration, **EPS, **options)  # type: ignore[arg-type]
    low, high = clip.bounds(torch.tensor([0]), torch.tensor([num_tokens], dtype=torch.float64))
    return low.item(), high.item()


def test_without_drift_and_noise_it_is_the_papers_clip() -> None:
    paper = clip_range(torch.zeros(1, dtype=torch.float64), **EPS).bounds(torch.tensor([0]), torch.tensor([7.0]))
    assert bounds(DRIFT, 0.0, 7.0) == tuple(bound.item() for bound in paper)


def test_the_margin_is_z_deviations_of_what_was_measured_for_the_lag_and_length() -> None:
    deviation = math.sqrt(0.0009 + 0.04 / 100)
    low, high = math.log1p(-3e-4), math.log1p(4e-4)
    assert bounds(DRIFT, 1.0, 100.0) == pytest.approx((low - deviation, high + deviation), rel=1e-12)
    assert bounds(DRIFT, 1.0, 100.0, z=2.0, scale=3.0) == pytest.approx((3 * low - 2 * deviation, 3 * high + 2 * deviation))
    assert bounds(DRIFT, 1.0, 0.0) == bounds(DRIFT, 1.0, 1.0), "an empty unit counts as one token"


@pytest.mark.parametrize(("z", "expected"), [(0.0, (math.log1p(-3e-4), math.log1p(4e-4))), (1.0, (-math.inf, math.inf))])
def test_a_variance_beyond_float32_clips_nothing_and_with_z_0_is_the_papers_clip(
    z: float, expected: tuple[float, float]
) -> None:
    huge = Calibration(*torch.tensor([[0.0], [1e200], [1e90]], dtype=torch.float64))
    clip = calibrated_clip_range(torch.zeros(1), huge, z=z, **EPS)  # type: ignore[arg-type]
    low, high = clip.bounds(torch.tensor([0]), torch.tensor([7.0]))
    assert (low.item(), high.item()) == pytest.approx(expected)


def test_the_range_widens_up_to_its_ceiling_and_the_statistics_say_for_how_many_it_holds() -> None:
    """Long turns reach it first: what their tokens share does not average out."""
    objective = replace(WIDEN, clip_calibration_cap=0.204, ratio_unit="turn")
    lag_S, turns_T = torch.tensor([0.0, 1.0], dtype=torch.float64), torch.tensor([0, 0, 1, 1, 0, 1, 1, 1])
    values = torch.zeros(2).double()
    stats = loss(objective, values, lag_S, values, calibration=DRIFT, turn_ids_T=turns_T).stats
    long, short, ceiling = math.sqrt(0.0009 + 0.04 / 3), math.sqrt(0.0009 + 0.04), 0.204 / math.sqrt(3)
    assert long > ceiling
    assert short < 0.204
    margin = (3 * ceiling + short) / 4
    assert stats.clip_high_S.tolist() == pytest.approx([math.log1p(4e-4), math.log1p(4e-4) + margin])
    assert stats.clip_low_S.tolist() == pytest.approx([math.log1p(-3e-4), math.log1p(-3e-4) - margin])
    assert stats.clip_capped_S.tolist() == [0, 0.75]
    assert summarise(stats)["clip_capped/lag_1"] == 0.75
    off = replace(objective, clip_calibration="off", noise_z=9.0)
    assert loss(off, values, lag_S, values, sigma=9.0, turn_ids_T=turns_T).stats.clip_capped_S.tolist() == [0, 0]
    with pytest.raises(ValueError, match=r"cap is 0\.0; give a number above 0"):
        bounds(DRIFT, 1.0, 4.0, cap=0.0)


@pytest.mark.parametrize(
    ("drift", "num_tokens", "held"),
    [(0.22, 3, False), (0.033, 200, False), (0.4, 3, True), (0.1, 50, True), (0.05, 4000, True)],
)
def test_the_default_ceiling_leaves_healthy_widths_and_holds_runaway_ones(drift: float, num_tokens: int, held: bool) -> None:
    """0.22 nats: the demo's first batches, at lag 2; 0.033: a small pretrained model."""
    calibration = Calibration(*torch.tensor([[0.0], [drift**2], [0.0]], dtype=torch.float64))
    clip = objective_clip_range(WIDEN, torch.zeros(1, dtype=torch.float64), sigma=0.0, calibration=calibration)
    _, high = clip.bounds(torch.tensor([0]), torch.tensor([num_tokens], dtype=torch.float64))
    assert high.item() - math.log1p(4e-4) == pytest.approx(0.5 / math.sqrt(num_tokens) if held else drift)


def test_an_objective_asks_for_its_calibrated_clip_range() -> None:
    objective = replace(WIDEN, noise_z=2.0, clip_calibration_cap=0.7)
    lag_S = torch.tensor([1.0], dtype=torch.float64)
    clip = objective_clip_range(objective, lag_S, sigma=9.0, scale=3.0, calibration=DRIFT)
    found = tuple(bound.item() for bound in clip.bounds(torch.tensor([0]), torch.tensor([100.0], dtype=torch.float64)))
    assert found == bounds(DRIFT, 1.0, 100.0, z=2.0, scale=3.0, cap=0.7) != bounds(DRIFT, 1.0, 100.0, z=2.0, scale=3.0)


def loss(
    objective: Objective, means: torch.Tensor, lag_S: torch.Tensor, advantages: torch.Tensor, **options: object
) -> LossOutput:
    """One sequence of four equal tokens for each mean log-ratio."""
    num = means.shape[0]
    ids_T = torch.arange(num).repeat_interleave(4)
    behaviour_T = torch.full((4 * num,), -30.0, dtype=torch.float64)
    return objective_loss(
        objective,
        (behaviour_T + means.repeat_interleave(4)).requires_grad_(),
        behaviour_T,
        advantages.repeat_interleave(4),
        torch.ones(4 * num, dtype=torch.bool),
        ids_T,
        num_sequences=num,
        lag_S=lag_S,
        **options,  # type: ignore[arg-type]
    )


def test_the_clipped_share_of_drifted_sequences_is_even_over_lags_where_a_fixed_range_clips_the_old() -> None:
    """Sequences as they are at the start of a batch, and a step of the learner on top, the same for every lag."""
    generator = torch.Generator().manual_seed(0)
    number, lags = 800, 5
    lag_S = torch.arange(lags, dtype=torch.float64).repeat_interleave(number)
    drift_S = lag_S * (-0.002 + 0.01 * torch.randn(lag_S.shape, generator=generator, dtype=torch.float64))
    step_S = 4e-4 * torch.randn(lag_S.shape, generator=generator, dtype=torch.float64)
    advantages_S = torch.where(torch.rand(lag_S.shape, generator=generator) < 0.5, 1.0, -1.0).double()
    calibration = LagCalibration(window=number)
    calibration.update(Measured(lag, 4.0, mean, 0.0) for lag, mean in zip(lag_S.tolist(), drift_S.tolist(), strict=True))

    def share_of_lags(objective: Objective) -> list[float]:
        stats = loss(objective, drift_S + step_S, lag_S, advantages_S, calibration=calibration.current).stats
        clipped_S = stats.clipped_high_S + stats.clipped_low_S
        return [clipped_S[lag_S == lag].mean().item() for lag in range(lags)]

    fixed = share_of_lags(Objective(clip_calibration="off"))
    assert min(fixed[1:]) > fixed[0] + 0.2
    shares = share_of_lags(WIDEN)
    assert shares[0] == fixed[0], "at lag 0 nothing has drifted"
    assert max(shares[1:]) - min(shares[1:]) < 0.05


def test_the_statistics_say_the_clip_range_and_what_was_measured() -> None:
    lag_S = torch.tensor([0.0, 1.0], dtype=torch.float64)
    stats = loss(WIDEN, torch.tensor([0.02, -0.05]).double(), lag_S, torch.ones(2).double(), calibration=DRIFT).stats
    margin = math.sqrt(0.0009 + 0.04 / 4)
    assert stats.clip_low_S.tolist() == pytest.approx([math.log1p(-3e-4), math.log1p(-3e-4) - margin])
    assert stats.clip_high_S.tolist() == pytest.approx([math.log1p(4e-4), math.log1p(4e-4) + margin])
    assert stats.mismatch_S.tolist() == pytest.approx([0.02, -0.05])
    assert stats.mismatch_variance_S.tolist() == pytest.approx([0, 0], abs=1e-12)


def test_the_mismatch_of_a_sequence_is_the_mean_and_variance_of_its_tokens() -> None:
    learner_T = torch.tensor([-1.0, -2.0, -3.0, float("nan"), -1.0], dtype=torch.float64, requires_grad=True)
    behaviour_T = torch.tensor([-1.1, -2.4, -2.9, -1.0, -1.5], dtype=torch.float64)
    mask_T = torch.tensor([True, True, True, False, True])
    found = sequence_mismatch(learner_T, behaviour_T, mask_T, torch.tensor([0, 0, 0, 0, 2]), 3)
    deltas = [0.1, 0.4, -0.1]
    assert found.mean_S.tolist() == pytest.approx([fmean(deltas), 0.0, 0.5])
    assert found.token_variance_S.tolist() == pytest.approx([variance(deltas), 0.0, 0.0])
    assert found.kl_S[0].item() == pytest.approx(fmean(math.expm1(x) - x for x in deltas))
    assert not found.mean_S.requires_grad


@given(
    choices=st.randoms(use_true_random=False),
    objective=st.sampled_from(
        [
            WIDEN,
            replace(WIDEN, clip_calibration_cap=1e300, noise_z=9.0, log_ratio_clamp=63.0),
            replace(WIDEN, clip_calibration="off", noise_z=9.0),
            Objective(anchor="proximal"),
            Objective.m2po(),
        ]
    ),
)
@settings(max_examples=40, deadline=None)
def test_whatever_was_measured_no_estimate_ends_the_learner_and_every_metric_is_finite(
    choices: random.Random, objective: Objective
) -> None:
    """Log-probs of a learner may be any finite float32, those of an engine are those that the broker accepts."""
    lengths = [choices.randint(1, 4) for _ in range(choices.randint(1, 4))]
    ids_T = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    rows = range(len(ids_T))
    learner_T = torch.tensor([choices.choice([0.0, -1e-45, -1e-38, -50.0, -1e19, -1.7e38, -3.4e38]) for _ in rows])
    behaviour_T = torch.tensor([choices.choice([0.0, -1e-45, -1.0, MIN_LOGPROB]) for _ in rows])
    mask_T = torch.tensor([choices.random() < 0.8 for _ in rows])
    advantages_T = torch.tensor([choices.choice([0.0, 1e-45, -1.0, 30.0]) for _ in lengths])[ids_T]
    lag_S = torch.tensor([choices.choice([0.0, 0.5, 1e6]) for _ in lengths])
    calibration, tracker, adaptive = LagCalibration(window=20), MismatchTracker(), AdaptiveClip(target=0.15)
    for _ in range(2):
        output = objective_loss(
            objective,
            learner_T.clone().requires_grad_(),
            behaviour_T,
            advantages_T,
            mask_T,
            ids_T,
            num_sequences=len(lengths),
            lag_S=lag_S,
            sigma=tracker.sigma,
            clip_scale=adaptive.scale,
            calibration=calibration.current,
            proximal_logprobs_T=learner_T if objective.needs_proximal_logprobs else None,
            num_tokens=len(ids_T) if objective.aggregation == "token" else None,
        )
        assert math.isfinite(output.loss.item())
        summary = summarise(output.stats)
        assert all(map(math.isfinite, summary.values())), {k: v for k, v in summary.items() if not math.isfinite(v)}
        calibration.update(20 * measured_sequences(output.stats, range(len(lengths))))
        assert all(map(math.isfinite, calibration.metrics().values()))
        tracker.update(mismatch_moments(learner_T, behaviour_T, mask_T, torch.zeros_like(ids_T), 0))
        adaptive.update(signal_clip_fraction(summary) or 0.0)
        assert 0 < ess_rate_scale(output.stats.mismatch_S * output.stats.num_tokens_S) <= 1
        assert math.isfinite(tracker.sigma)


def test_an_objective_that_needs_a_calibration_says_what_to_give() -> None:
    values = torch.zeros(1).double()
    with pytest.raises(ValueError, match=r"calibration is missing with .*give LagCalibration\.current"):
        loss(WIDEN, values, values, values)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            {"clip_calibration": "widen", "anchor": "proximal"},
            "with anchor 'proximal': that ratio holds neither drift nor noise",
        ),
        ({"clip_calibration": "widen", "anchor": "behaviour", "clip_range_growth": 1.0}, "the other guesses it"),
        ({"clip_calibration": "wide"}, "clip_calibration is 'wide'; choose one of off, widen"),
    ],
)
def test_contradictions_are_named_with_the_way_out(fields: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Objective(**fields)  # type: ignore[arg-type]
