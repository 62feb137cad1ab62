"""One curve: the value of a setting in each batch of a run."""

import math
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, model_validator

from gspo_services.shared.settings.sections.section import Section

Step = tuple[Annotated[int, Field(ge=1)], float]


def value_at(curve: "Schedule | None", batch: int, own: float, num_batches: int) -> float:
    """Return the value of a setting in ``batch``: its ``own`` without a curve. After the run's end, the last batch's."""
    return own if curve is None else curve.at(min(batch, num_batches - 1), own, num_batches)


class Schedule(Section):
    """How one setting changes during a run. It starts with the setting's own value, v; batches count from 0.

    With b the batch, ``start`` the batch where a change begins and ``end`` the one where it is complete:

        steps      the value of the last step that b has reached, as in ``steps = [[20, 512], [40, 1024]]``
        linear     v + (to - v) * t,                          t = (b - start) / (end - start), within 0 and 1
        cosine     to + (v - to) * (1 + cos(pi * t)) / 2      (arXiv 1608.03983, eq. 5, without restarts)
        constant   v, and over the last ``decay`` batches before ``end`` the straight line to ``to``

    With ``warmup`` batches, batch b of these has v * (b + 1) / warmup, and a change begins after them.
    """

    shape: Literal["steps", "linear", "cosine", "constant"] = "steps"
    """The curve; steps if only ``steps`` is given."""
    steps: list[Step] = Field([])
    """For steps: [batch, value], in order. Each value applies from that batch on."""
    to: float | None = None
    """For the others: the value at the end. Not set: 0, which only a learning rate can have, as it never gets there."""
    warmup: int = Field(0, ge=0)
    """Batches over which the value rises from v / warmup to v; for a learning rate only."""
    decay: int | None = Field(None, ge=1)
    """For constant: the number of batches before the end in which the value changes. Not set: it does not change."""
    start: int | None = Field(None, ge=0)
    """For linear and cosine: the batch where the change begins. Not set: after the warm-up."""
    end: int | None = Field(None, ge=1)
    """The batch from which the value is ``to``. Not set: run.num_batches, so the last batch is just before it."""

    @model_validator(mode="after")
    def _of_one_shape(self) -> "Schedule":
        if (self.shape == "steps") != bool(self.steps):
            way_out = "give steps = [[BATCH, VALUE], ...]" if self.shape == "steps" else "leave steps out, or shape"
            raise ValueError(f"shape is {self.shape!r} and steps are {self.steps!s:.100}: {way_out}")
        batches = [batch for batch, _ in self.steps]
        if any(later <= earlier for earlier, later in pairwise(batches)):
            raise ValueError(f"steps are at the batches {batches!s:.100}: give each once, in order")
        foreign = {"decay": "constant", "to": "", "end": "", "warmup": ""} if self.shape == "steps" else {}
        foreign |= {"start": "linear or cosine"} if self.shape in ("steps", "constant") else {}
        foreign |= {"decay": "constant"} if self.shape != "constant" else {}
        for name, shape in foreign.items():
            if getattr(self, name) not in (None, type(self).model_fields[name].default):
                belongs = f"it belongs to shape {shape}" if shape else "every step has its batch and its value"
                raise ValueError(f"{name} is {getattr(self, name)} with shape {self.shape!r}: {belongs}; remove it")
        for name in ("to", "end"):
            if self.shape == "constant" and self.decay is None and getattr(self, name) is not None:
                raise ValueError(
                    f"{name} is {getattr(self, name)} with shape 'constant' and without decay, so nothing changes: give "
                    "decay, the batches over which it does, or remove it"
                )
        return self

    def bounds(self, num_batches: int) -> tuple[int, int]:
        """Return the batches where the change begins, and where it is complete."""
        end = num_batches if self.end is None else self.end
        if self.shape == "constant":
            return (end, end) if self.decay is None else (end - self.decay, end)
        return self.warmup if self.start is None else self.start, end

    def at(self, batch: int, value: float, num_batches: int) -> float:
        """Return the value in ``batch``, where ``value`` is the setting's own."""
        if self.shape == "steps":
            return next((new for first, new in reversed(self.steps) if first <= batch), value)
        if batch < self.warmup:
            return value * (batch + 1) / self.warmup
        start, end = self.bounds(num_batches)
        if batch < start or (self.shape == "constant" and self.decay is None):
            return value
        to = 0.0 if self.to is None else self.to
        if batch >= end:
            return to
        share = (batch - start) / (end - start)
        if self.shape == "cosine":
            return to + (value - to) * (1 + math.cos(math.pi * share)) / 2
        return value + (to - value) * share

    def turning_batches(self, num_batches: int) -> set[int]:
        """Batches of the run with every extreme of the curve: between two neighbours it only rises or only falls."""
        turns = {0, num_batches - 1, self.warmup - 1, self.warmup}
        turns |= {batch - before for batch, _ in self.steps for before in (0, 1)}
        for bound in self.bounds(num_batches) if self.shape != "steps" else ():
            turns |= {bound - 1, bound}
        return {batch for batch in turns if 0 <= batch < num_batches}
