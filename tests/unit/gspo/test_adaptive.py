"""The controller of the clip range's width: direction, bounds, fixed point and saved state."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.adaptive import AdaptiveClip


def test_the_scale_starts_at_one_and_stays_there_on_target() -> None:
    clip = AdaptiveClip(target=0.15)
    assert clip.scale == 1.0
    clip.update(0.15)
    assert clip.scale == 1.0


def test_more_clipping_than_wanted_widens_the_clip_range_and_less_narrows_it() -> None:
    clip = AdaptiveClip(target=0.2, rate=0.5)
    clip.update(0.3)
    assert clip.scale == pytest.approx(math.exp(0.5 * 0.5))
    clip.update(0.1)
    assert clip.scale == pytest.approx(1.0)


@given(fraction=st.floats(0, 1), target=st.floats(0.01, 0.99))
def test_a_step_is_at_most_the_rate(fraction: float, target: float) -> None:
    clip = AdaptiveClip(target=target, rate=0.1)
    clip.update(fraction)
    assert abs(math.log(clip.scale)) <= 0.1 * (1 + 1e-9)
    assert (clip.scale - 1) * (fraction - target) >= 0


def test_the_scale_stays_inside_its_bounds() -> None:
    clip = AdaptiveClip(target=0.5, rate=1.0, min_scale=0.5, max_scale=4.0)
    for _ in range(5):
        clip.update(1.0)
    assert clip.scale == 4.0
    for _ in range(9):
        clip.update(0.0)
    assert clip.scale == 0.5


@pytest.mark.parametrize("target", [0.03, 0.15, 0.4])
@pytest.mark.parametrize("deviation", [0.2, 1.0, 20.0])
def test_it_reaches_the_target_on_normal_log_ratios_and_stays_there(target: float, deviation: float) -> None:
    """Half of the sequences can be clipped above, half below; widths in units of the clip range at scale 1."""
    clip = AdaptiveClip(target=target)
    fractions = []
    for _ in range(200):
        fractions.append(1 - NormalDist(0, deviation).cdf(clip.scale))
        clip.update(fractions[-1])
    assert fractions[-20:] == pytest.approx([target] * 20, abs=0.01)


@pytest.mark.parametrize("bad", [float("nan"), -0.01, 1.01, float("inf")])
def test_an_impossible_fraction_is_refused_and_changes_nothing(bad: float) -> None:
    clip = AdaptiveClip(target=0.15)
    with pytest.raises(ValueError, match="clip_fraction is"):
        clip.update(bad)
    assert clip.scale == 1.0


def test_it_continues_from_its_state() -> None:
    first, second = AdaptiveClip(target=0.15), AdaptiveClip(target=0.15)
    first.update(0.4)
    second.load_state_dict(first.state_dict())
    for clip in (first, second):
        clip.update(0.05)
    assert second.scale == first.scale != 1.0


def test_impossible_settings_and_states_are_refused() -> None:
    for arguments in (
        {"target": 0.0},
        {"target": 1.0},
        {"target": 0.1, "rate": 0.0},
        {"target": 0.1, "rate": 1e300},
        {"target": 0.1, "min_scale": -1.0},
    ):
        with pytest.raises(ValueError, match=f"^{list(arguments)[-1]} is"):
            AdaptiveClip(**arguments)
    with pytest.raises(ValueError, match="min_scale is 2"):
        AdaptiveClip(target=0.1, min_scale=2.0)
    clip = AdaptiveClip(target=0.1)
    with pytest.raises(ValueError, match="state has keys"):
        clip.load_state_dict({"factor": 1.0})
    with pytest.raises(ValueError, match="scale is nan"):
        clip.load_state_dict({"scale": float("nan")})
    with pytest.raises(ValueError, match=r"scale is 100\.0"):
        clip.load_state_dict({"scale": 100.0})
