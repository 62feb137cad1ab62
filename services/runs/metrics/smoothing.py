"""Rolling measures over the batches of a run, for curves that show the trend and not every step."""

import math
from collections.abc import Callable, Sequence
from typing import Final

LEAST: Final = 12
"""Fewer values are drawn as they are."""
WINDOWS: Final = 20
"""A run is covered by this many windows in a row."""


def window(num_values: int) -> int:
    """Return how many values are averaged together: an odd number; 1 for a few."""
    return 1 if num_values < LEAST else 2 * max(1, num_values // WINDOWS // 2) + 1


def rolling(values: Sequence[float], measure: Callable[[list[float]], float]) -> list[float]:
    """Return ``measure`` of the known values around each position that has one; NaN elsewhere.

    At both ends the window keeps its size: one odd last value is not a trend.
    """
    size = window(len(values))
    found = []
    for place, value in enumerate(values):
        first = min(max(0, place - size // 2), len(values) - size)
        known = [each for each in values[first : first + size] if not math.isnan(each)]
        found.append(math.nan if math.isnan(value) else measure(known))
    return found


def mean(values: list[float]) -> float:
    """The mean of at least one value."""
    return sum(values) / len(values)


def quantile(share: float) -> Callable[[list[float]], float]:
    """Gives the value that ``share`` of the others do not exceed, between two of them where needed."""

    def measure(values: list[float]) -> float:
        ordered = sorted(values)
        place = share * (len(ordered) - 1)
        low = math.floor(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    return measure
