"""Amounts that are known only within bounds, and their text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

GIB: Final = 2.0**30
BYTES: Final = {"float32": 4, "bfloat16": 2}
"""Bytes of one element."""


@dataclass(frozen=True)
class Span:
    """An estimate: the value lies between ``low`` and ``high`` if the assumptions of its formula hold."""

    low: float
    high: float

    def __add__(self, other: Span | float) -> Span:
        return Span(self.low + other.low, self.high + other.high) if isinstance(other, Span) else self + Span(other, other)

    def __mul__(self, factor: float) -> Span:
        return Span(self.low * factor, self.high * factor)

    def divided_by(self, other: Span) -> Span:
        """Return the quotient of two amounts that do not depend on each other."""
        return Span(self.low / other.high, self.high / other.low)

    @property
    def gib(self) -> str:
        """As GiB."""
        return self._shown(1 / GIB, "GiB")

    @property
    def seconds(self) -> str:
        """As seconds."""
        return self._shown(1.0, "s")

    @property
    def rate(self) -> str:
        """As tokens per second."""
        return self._shown(1.0, "tokens/s")

    def _shown(self, scale: float, unit: str) -> str:
        low, high = brief(self.low * scale), brief(self.high * scale)
        return f"{low} {unit}" if low == high else f"{low} to {high} {unit}"


def exactly(value: float) -> Span:
    """Return an amount that is known exactly."""
    return Span(value, value)


def gib(num_bytes: float) -> str:
    """A known amount of memory."""
    return exactly(num_bytes).gib


def at_most(*spans: Span) -> Span:
    """Return the largest of several amounts."""
    return Span(max(span.low for span in spans), max(span.high for span in spans))


def brief(value: float) -> str:
    """Format with two significant digits, for numbers that are not known better."""
    if value >= 100:
        digits = 10 ** (len(str(int(value))) - 2)
        return f"{round(value / digits) * digits:,}"
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"
