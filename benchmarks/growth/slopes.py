"""How fast a figure grows: the power of the number of batches, with an interval."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from gspo_services.shared.eval_metrics import t_quantile

STAYS = 1.1
"""A figure that never exceeds its first value by more than this factor does not grow."""


class Slope(NamedTuple):
    """``power``: 0 where a figure stays, 1 where it is in proportion to the batches. ``half``: of its 95 % interval."""

    power: float
    half: float

    def __str__(self) -> str:
        return f"{self.power:+.2f} ± {self.half:.2f}"


def growth(batches: Sequence[int], values: Sequence[float]) -> Slope | None:
    """The slope of what a figure has more than at the first mark, which is small beside the others; None: it stays.

    So the seconds of imports, which are the same in a run of any length, do not hide what grows.
    """
    more = [value - values[0] for value in values[1:]]
    if max(values) <= STAYS * values[0] or min(more) <= 0:
        return None
    return slope(batches[1:], more)


def slope(batches: Sequence[int], values: Sequence[float]) -> Slope:
    """Fit log(value) over log(batches) by least squares. Raises: ValueError for fewer than three or for none above 0."""
    if len(batches) != len(values) or len(batches) < 3 or min(values) <= 0:
        raise ValueError(f"a slope needs three figures above 0, not {list(values)}")
    x, y = [math.log(each) for each in batches], [math.log(each) for each in values]
    mean_x, mean_y = math.fsum(x) / len(x), math.fsum(y) / len(y)
    spread = math.fsum((each - mean_x) ** 2 for each in x)
    power = math.fsum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    left = math.fsum((b - mean_y - power * (a - mean_x)) ** 2 for a, b in zip(x, y, strict=True))
    degrees = len(x) - 2
    error = math.sqrt(left / degrees / spread)
    return Slope(power, t_quantile(degrees) * error)
