"""Rolling measures."""

import math

from gspo_services.runs.metrics import mean, quantile, rolling, window


def test_few_values_are_not_smoothed() -> None:
    assert [window(count) for count in (1, 11, 12, 60, 200)] == [1, 1, 3, 3, 11]
    assert rolling([1.0, 5.0, math.nan], mean)[:2] == [1.0, 5.0]


def test_a_rolling_window_is_whole_at_both_ends_and_leaves_gaps() -> None:
    values = [0.0] * 59 + [30.0]
    assert rolling(values, mean)[-1] == 10.0
    assert rolling(values, quantile(0.5))[-1] == 0.0
    values[30] = math.nan
    assert math.isnan(rolling(values, mean)[30])


def test_quantiles_are_between_values() -> None:
    assert quantile(0.25)([4.0, 1.0, 3.0, 2.0]) == 1.75
    assert quantile(0.9)([7.0]) == 7.0
