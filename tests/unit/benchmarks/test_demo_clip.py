"""Clipped shares of two lags: within batches that have both, weighed by the rarer one, over several runs."""

from benchmarks.demo_clip import clipped_in_same_batches, compared


def row(**lags: tuple[float, int, int]) -> dict[str, float]:
    """One batch: the clipped share of a lag's sequences, how many it has, and how many of them have a signal."""
    return {
        f"{name}/{lag}": value
        for lag, values in lags.items()
        for name, value in zip(("clip_fraction", "sequences", "signal_sequences"), values, strict=True)
    }


def test_shares_are_those_of_sequences_with_a_signal_in_batches_that_have_both_lags() -> None:
    batches = [
        row(lag_0=(0.25, 80, 40), lag_1=(0.1, 100, 20)),
        row(lag_0=(1.0, 80, 80)),
        row(lag_0=(1.0, 80, 80), lag_1=(1.0, 80, 9)),
    ]
    assert clipped_in_same_batches(batches, "lag_0", "lag_1") == [(0.5, 0.5, 20.0)]


def test_the_difference_weighs_batches_and_has_an_interval_over_them() -> None:
    assert compared([(0.5, 0.3, 30.0), (0.1, 0.3, 10.0)]) == "0.40 / 0.30, +0.100 ± 0.294 (2)"
    assert compared([(0.4, 0.3, 10.0), (0.4, 0.3, 90.0)]) == "0.40 / 0.30, +0.100 ± 0.000 (2)"
    assert compared([(0.4, 0.3, 10.0)]) == "- (1)"
