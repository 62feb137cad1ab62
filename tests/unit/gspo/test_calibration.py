"""The running estimates of location and spread of mean log-ratios, by lag."""

import json
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from gspo.calibration import NOTHING_MEASURED, Calibration, LagCalibration, Measured


def drifted(rng: random.Random, lag: int, number: int, *, between: float, token: float, location: float) -> list[Measured]:
    """Sequences of 5 to 200 tokens whose log-ratios are normal with these deviations, per version of lag and per token."""
    found = []
    for _ in range(number):
        num_tokens = rng.randint(5, 200)
        own = location * lag + rng.gauss(0, between * lag)
        tokens = [own + rng.gauss(0, token) for _ in range(num_tokens)]
        mean = sum(tokens) / num_tokens
        variance = sum((value - mean) ** 2 for value in tokens) / (num_tokens - 1)
        found.append(Measured(float(lag), float(num_tokens), mean, variance))
    return found


def at(calibration: Calibration, lag: float) -> tuple[float, float, float]:
    location, between, token = calibration.at(torch.tensor([lag]))
    return location.item(), between.item(), token.item()


def test_a_mean_lag_between_two_whole_ones_counts_as_the_even_one() -> None:
    measured = LagCalibration()
    measured.update(Measured(lag, 10, 0.0, 0.0) for lag in (0.5, 1.5, 2.5, 0.75))
    assert measured.num_sequences == {0: 1, 1: 1, 2: 2}


def test_before_anything_is_measured_and_at_lag_0_without_noise_nothing_is_added() -> None:
    assert at(NOTHING_MEASURED, 7.0) == (0.0, 0.0, 0.0)
    calibration = LagCalibration()
    calibration.update(Measured(0.0, 100.0, 0.0, 0.0) for _ in range(50))
    calibration.update(drifted(random.Random(0), 3, 50, between=0.01, token=0.1, location=-0.01))
    assert at(calibration.current, 0.0) == (0.0, 0.0, 0.0)
    assert at(calibration.current, 3.0)[1] > 0


def test_location_spread_between_sequences_and_noise_of_a_token_are_found_for_every_lag() -> None:
    rng, calibration = random.Random(1), LagCalibration(window=2000)
    for lag in (0, 1, 2, 4):
        calibration.update(drifted(rng, lag, 2000, between=0.02, token=0.05, location=-0.01))
    for lag in (0, 1, 2, 4):
        location, between, token = at(calibration.current, float(lag))
        assert location == pytest.approx(-0.01 * lag, abs=0.003)
        assert math.sqrt(between) == pytest.approx(0.02 * lag, rel=0.1, abs=0.003)
        assert math.sqrt(token) == pytest.approx(0.05, rel=0.05)


def test_outliers_move_no_estimate_far() -> None:
    rng = random.Random(2)
    clean, dirty = LagCalibration(), LagCalibration()
    sequences = drifted(rng, 2, 120, between=0.02, token=0.05, location=-0.01)
    clean.update(sequences)
    dirty.update([*sequences[:108], *(Measured(2.0, 3.0, 9.0, 50.0) for _ in range(12))])
    for before, after in zip(at(clean.current, 2.0), at(dirty.current, 2.0), strict=True):
        assert after == pytest.approx(before, rel=0.6, abs=0.005)


def test_a_new_lag_starts_on_the_line_of_the_others_and_moves_away_with_its_own_sequences() -> None:
    rng, calibration = random.Random(3), LagCalibration()
    for lag in (0, 1, 2):
        calibration.update(drifted(rng, lag, 128, between=0.02, token=0.0, location=-0.01))
    expected = at(calibration.current, 3.0)
    assert expected[0] == pytest.approx(-0.03, rel=0.2)
    assert at(calibration.current, 40.0) == expected, "beyond the line nothing is known"
    steps = [expected]
    for _ in range(128):
        calibration.update([Measured(3.0, 50.0, 0.5 + rng.gauss(0, 0.01), 0.0)])
        steps.append(at(calibration.current, 3.0))
    locations = [location for location, _, _ in steps]
    assert np.abs(np.diff(locations)).max() < 0.05
    assert locations[-1] == pytest.approx(0.44, abs=0.05)


def test_a_sequence_weighs_in_the_variance_of_a_token_by_its_degrees_of_freedom() -> None:
    """The means differ by far more than the tokens explain, so that the variance is not made smaller."""
    calibration = LagCalibration()
    calibration.update(
        Measured(0.0, tokens, mean, variance) for tokens, variance in ((2, 0.01), (3, 0.02)) for mean in (-9.0, 9.0) * 16
    )
    assert at(calibration.current, 0.0)[2] == pytest.approx((1 * 0.01 + 2 * 0.02) / 3 * (64 - 16) / 64)


def test_between_two_lags_lies_the_straight_line() -> None:
    calibration = Calibration(*torch.tensor([[0.0, -0.2], [0.0, 0.4], [0.1, 0.3]], dtype=torch.float64))
    assert at(calibration, 0.25) == pytest.approx((-0.05, 0.1, 0.15))


def test_old_sequences_leave_the_window() -> None:
    calibration = LagCalibration(window=20)
    calibration.update(Measured(1.0, 10.0, 5.0, 1.0) for _ in range(20))
    assert at(calibration.current, 1.0)[0] > 0
    calibration.update(Measured(1.0, 10.0, 0.0, 0.0) for _ in range(20))
    assert at(calibration.current, 1.0) == (0.0, 0.0, 0.0)
    assert calibration.num_sequences == {1: 20}


@pytest.mark.parametrize("known", [0, 128])
@given(means=st.lists(st.floats(-10, 10), max_size=16), lag=st.sampled_from([2, 4, 9]))
def test_sixteen_sequences_of_a_new_lag_move_no_estimate(known: int, means: list[float], lag: int) -> None:
    """Neither their own nor, through the line, that of another lag, whatever they are."""
    calibration = LagCalibration()
    calibration.update(Measured(float(other), 20.0, 0.01 * number, 1.0) for other in (0, 1, 3) for number in range(known))
    before = calibration.current
    calibration.update(Measured(float(lag), 20.0, mean, 50.0) for mean in means)
    for values, earlier in zip(vars(calibration.current).values(), vars(before).values(), strict=True):
        assert torch.equal(values, earlier)


def test_metrics_say_how_many_sequences_of_each_lag_were_taken_and_when_one_was_last() -> None:
    calibration = LagCalibration()
    assert calibration.metrics() == {}
    calibration.update(Measured(lag, 9.0, 0.25 * lag, 0.0) for lag in (0.0, 0.4, 1.0, 3.0, 4.0) for _ in range(32))
    found = calibration.metrics()
    assert [found.pop(f"calibration_sequences/{name}") for name in ("lag_0", "lag_1", "lag_3_4")] == [64, 32, 64]
    assert [found.pop(f"calibration_age/{name}") for name in ("lag_0", "lag_1", "lag_3_4")] == [0, 0, 0]
    assert found == {
        f"calibration_location/{name}": at(calibration.current, lag)[0]
        for name, lag in (("lag_0", 0.0), ("lag_1", 1.0), ("lag_3_4", 4.0))
    }
    assert found["calibration_location/lag_3_4"] > 0.5
    calibration.update([Measured(4.0, 9.0, 1.0, 0.0)])
    calibration.update([])
    resumed = LagCalibration()
    resumed.load_state_dict(calibration.state_dict())
    for each in (calibration, resumed):
        each.update([Measured(0.0, 9.0, 0.0, 0.0)])
        found = each.metrics()
        assert [found[f"calibration_sequences/{name}"] for name in ("lag_0", "lag_1", "lag_3_4")] == [1, 0, 0]
        assert [found[f"calibration_age/{name}"] for name in ("lag_0", "lag_1", "lag_3_4")] == [0, 3, 2]


def test_a_state_without_ages_is_read_and_they_count_from_then() -> None:
    calibration = LagCalibration()
    calibration.load_state_dict({"format": 1, "sequences": [[1.0, 5.0, 0.1, 0.0]]})
    calibration.update([])
    assert calibration.metrics()["calibration_age/lag_1"] == 1


def test_sequences_without_action_tokens_are_left_out() -> None:
    calibration = LagCalibration()
    calibration.update([Measured(0.0, 0.0, 0.0, 0.0)])
    assert calibration.current is NOTHING_MEASURED


extreme = st.sampled_from([0.0, 5e-324, 1e-305, 1e-200, 1.0, 1e99, 9.9e99])
measured = st.builds(
    Measured,
    lag=st.floats(0, 70) | st.sampled_from([0.0, 1.0, 1e300]),
    num_tokens=st.integers(1, 10_000).map(float) | st.sampled_from([1.0, 2.0, 9.9e99]),
    mean=st.floats(-10, 10) | extreme | extreme.map(lambda value: -value),
    token_variance=st.floats(0, 100) | extreme,
)


@given(st.lists(st.lists(measured, max_size=6), max_size=4), st.floats(0, 100), st.sampled_from([1, 20]))
@example([[Measured(0.0, 100.0, mean, 1e-305) for mean in (10.0, 0.0, -10.0)]], 0.0, 20)
@example([[Measured(float(lag), 9e99, mean, 9e99) for mean in (9e99, 0.0, -9e99)] for lag in (0, 1, 1023)], 1024.0, 20)
def test_whatever_was_measured_the_estimates_are_finite_and_survive_being_saved(
    batches: list[list[Measured]], lag: float, times: int
) -> None:
    calibration = LagCalibration(window=20)
    for batch in batches:
        calibration.update(times * batch)
        assert all(map(math.isfinite, calibration.metrics().values()))
    location, between, token = at(calibration.current, lag)
    assert math.isfinite(location)
    assert 0 <= between < math.inf
    assert 0 <= token < math.inf
    resumed = LagCalibration(window=20)
    resumed.load_state_dict(json.loads(json.dumps(calibration.state_dict())))
    assert at(resumed.current, lag) == (location, between, token)
    resumed.update([Measured(1.0, 5.0, 0.1, 0.0)])
    calibration.update([Measured(1.0, 5.0, 0.1, 0.0)])
    assert at(resumed.current, lag) == at(calibration.current, lag)


def test_bad_numbers_are_refused_before_anything_changes() -> None:
    calibration = LagCalibration()
    calibration.update([Measured(1.0, 5.0, 0.1, 0.0)])
    before = calibration.state_dict()
    for bad in (
        Measured(-1.0, 5.0, 0.0, 0.0),
        Measured(math.nan, 5.0, 0.0, 0.0),
        Measured(0.0, math.inf, 0.0, 0.0),
        Measured(0.0, 5.0, math.nan, 0.0),
        Measured(0.0, 5.0, 0.0, -1.0),
        Measured(0.0, 1e100, 0.0, 0.0),
        Measured(0.0, 5.0, -1.1e100, 0.0),
        Measured(0.0, 5.0, 0.0, 1e100),
    ):
        with pytest.raises(ValueError, match="give a finite number"):
            calibration.update([Measured(0.0, 5.0, 0.0, 0.0), bad])
    assert calibration.state_dict() == before
    with pytest.raises(ValueError, match="window is 16; give the sequences to keep for each lag, more than 16"):
        LagCalibration(window=16)


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({}, "format None"),
        ({"format": 0, "sequences": []}, "format 0"),
        ({"format": 1, "sequences": [], "ages": []}, "format 1 and keys"),
        (
            {"format": 2, "sequences": [[1.0, 2.0, 0.0, 0.0]], "ages": [1, 1]},
            r"ages are \[1, 1\]; .* each of the lags \[1\]",
        ),
        ({"format": 2, "sequences": [[1.0, 2.0, 0.0, 0.0]], "ages": [-1]}, r"ages are \[-1\]"),
        ({"format": 1, "sequences": [[1.0, 2.0]]}, "fields other than"),
        ({"format": 1, "sequences": [[1.0, 2.0, math.nan, 0.0]]}, "mean is nan"),
    ],
)
def test_a_state_of_another_format_is_refused_with_the_way_out(state: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        LagCalibration().load_state_dict(state)
