"""How fast a figure grows is told from what it has beyond its first value."""

import pytest

from benchmarks.growth.slopes import growth, slope

BATCHES = [100, 1000, 2000, 4000, 7000, 10_000]


def test_a_power_is_found_whatever_stands_before_it() -> None:
    for power in (0.5, 1.0, 2.0):
        found = growth(BATCHES, [3.0 + 0.1 * (each - 100) ** power for each in BATCHES])
        assert found is not None
        assert found.power == pytest.approx(power, abs=0.1)
        assert found.half < 0.1
    assert str(slope([1, 2, 4, 8], [2.0, 4.0, 8.0, 16.0])) == "+1.00 ± 0.00"


def test_what_stays_has_no_power_and_noise_widens_the_interval() -> None:
    assert growth(BATCHES, [5.0, 5.2, 5.4, 5.1, 5.3, 5.45]) is None
    assert growth(BATCHES, [5.0, 9.0, 4.0, 5.0, 5.0, 5.0]) is None
    noisy = slope(BATCHES, [1.0, 30.0, 9.0, 80.0, 30.0, 200.0])
    assert noisy.half > 0.5
    # Student's t for two degrees of freedom, by hand: the residuals of four points around a line.
    assert slope([1, 10, 100, 1000], [1.0, 20.0, 50.0, 1000.0]).half == pytest.approx(0.5496, abs=0.001)


def test_a_slope_needs_three_figures_above_zero() -> None:
    for batches, values in (([1, 2], [1.0, 2.0]), ([1, 2, 3], [1.0, 0.0, 2.0]), ([1, 2, 3], [1.0, 2.0])):
        with pytest.raises(ValueError, match="three figures above 0"):
            slope(batches, values)
