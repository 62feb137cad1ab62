"""Profiles each batch: phases that add up to its time, speed, packing, balance of the ranks, FLOPs.

``gspo learner --profile`` makes a ``StepProfile``; otherwise ``NO_PROFILE`` does nothing in its place. On a GPU the marks
between phases are CUDA events on the stream: the host runs ahead as it does without a profile, and waits once, at the end of
the batch. A phase's time is then that of the device; what the host did meanwhile shows only where the device waited for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal, Protocol, get_args

import torch
from torch import Tensor

from gspo_services.learner.profiling.flops import ModelCost
from gspo_services.shared.runtime.clock import Clock

Phase = Literal[
    "wait",
    "prepare",
    "first_pass",
    "forward",
    "loss",
    "backward",
    "optimizer",
    "diagnostics",
    "export",
    "publish",
    "checkpoint",
    "other",
]
"""wait: for the batch. prepare: groups, advantages, packing. first_pass: log-probs of the batch's start. forward: model and
log-probs. loss: objective and its statistics. backward: with the reduction of gradients. optimizer: checks of the gradients,
clipping, step. diagnostics: gathered from the ranks and summarised. export: weights to the host. publish: until the former
version is announced and the broker client has taken this one. checkpoint: copy and publication of the state. other: rest."""
PHASES: Final[tuple[Phase, ...]] = get_args(Phase)
COMPUTE: Final[tuple[Phase, ...]] = ("first_pass", "forward", "loss", "backward", "optimizer")
"""The phases whose time gives the speed in tokens and FLOPs."""


@dataclass(frozen=True, kw_only=True)
class PlannedWork:
    """What a batch is to be."""

    lengths: Sequence[int] = ()
    """Of its sequences, on all ranks."""
    still_lengths: Sequence[int] = ()
    """Of those that get no backward pass."""
    own_tokens: int = 0
    """On this rank."""
    num_micro_batches: int = 0
    """On this rank."""
    first_pass: bool = False


class Phases(Protocol):
    """What the training loop reports about its phases."""

    def phase(self, name: Phase) -> AbstractContextManager[None]:
        """The time inside is this phase's, except what an inner phase takes."""

    def planned(self, work: PlannedWork) -> None:
        """Take what the batch is to be."""

    def end_batch(self, index: int, sum_over_ranks: Callable[[Tensor], Tensor]) -> None:
        """The batch is over. Collective."""


_NOTHING: Final[AbstractContextManager[None]] = nullcontext()


class NoProfile:
    """Does nothing."""

    def phase(self, name: Phase) -> AbstractContextManager[None]:
        return _NOTHING

    def planned(self, work: PlannedWork) -> None:
        return

    def end_batch(self, index: int, sum_over_ranks: Callable[[Tensor], Tensor]) -> None:
        return


NO_PROFILE: Final = NoProfile()


class Timeline(Protocol):
    """Marks in time, read later."""

    def mark(self) -> None:
        """Remember now."""

    def seconds(self) -> list[float]:
        """Return the seconds between each mark and the next; the last mark becomes the first of the following ones."""


class HostTimeline:
    """Marks of a clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._marks: list[float] = []

    def mark(self) -> None:
        self._marks.append(self._clock.now())

    def seconds(self) -> list[float]:
        gaps = [end - begin for begin, end in pairwise(self._marks)]
        self._marks = self._marks[-1:]
        return gaps


class DeviceTimeline:
    """CUDA events on the current stream; only ``seconds`` waits for the device."""

    def __init__(self, make_event: Callable[[], torch.cuda.Event] = lambda: torch.cuda.Event(enable_timing=True)) -> None:
        self._make_event = make_event
        self._marks: list[torch.cuda.Event] = []

    def mark(self) -> None:
        event = self._make_event()
        event.record()
        self._marks.append(event)

    def seconds(self) -> list[float]:
        self._marks[-1].synchronize()
        gaps = [begin.elapsed_time(end) / 1000 for begin, end in pairwise(self._marks)]
        self._marks = self._marks[-1:]
        return gaps


@dataclass(frozen=True, kw_only=True)
class BatchProfile:
    """One batch; the same on every rank."""

    batch: int
    rank_seconds: list[dict[Phase, float]]
    """For each rank, by phase; they add up to the rank's time since the batch before."""
    rank_tokens: list[int]
    """Tokens that each rank trained."""
    tokens: int
    num_micro_batches: int
    """Rounds of forward and backward on each rank."""
    packing_efficiency: float
    """Tokens over the room in all micro-batches; above 1 when sequences are longer than a micro-batch may be."""
    padding_efficiency: float
    """Tokens over those of rows padded to the longest: shows what packing saves."""
    flops: float
    """Model FLOPs of the batch: training and the first pass, on all ranks."""
    peak_flops: float | None
    """The peak of one rank's device, per second; None: unknown."""

    @property
    def seconds(self) -> dict[Phase, float]:
        """The mean over ranks, by phase."""
        return {phase: sum(rank[phase] for rank in self.rank_seconds) / len(self.rank_seconds) for phase in PHASES}

    @property
    def slowest(self) -> dict[Phase, float]:
        """The time of the slowest rank, by phase."""
        return {phase: max(rank[phase] for rank in self.rank_seconds) for phase in PHASES}

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def compute_s(self) -> float:
        """The time of the phases in which tokens are trained."""
        return sum(self.seconds[phase] for phase in COMPUTE)

    @property
    def imbalance(self) -> float:
        """The largest rank's tokens over the mean of all ranks."""
        return max(self.rank_tokens) * len(self.rank_tokens) / max(1, sum(self.rank_tokens))

    @property
    def mfu(self) -> float | None:
        """The model's FLOPs as a share of the devices' peak, while tokens are trained."""
        if self.peak_flops is None or self.compute_s == 0:
            return None
        return self.flops / (self.compute_s * len(self.rank_seconds) * self.peak_flops)


class StepProfile:
    """One rank's stopwatch. Phases nest; each moment belongs to the innermost one.

    ``report`` is called with every batch's profile, on every rank.
    """

    def __init__(
        self,
        timeline: Timeline,
        *,
        rank: int,
        world_size: int,
        max_tokens_per_micro_batch: int,
        cost: ModelCost,
        peak_flops: float | None,
        report: Callable[[BatchProfile], None],
    ) -> None:
        self._timeline = timeline
        self._rank, self._world_size = rank, world_size
        self._max_tokens_per_micro_batch = max_tokens_per_micro_batch
        self._cost = cost
        self._peak_flops = peak_flops
        self._report = report
        self._inside: list[Phase] = ["other"]
        self._begun: list[Phase] = []
        """The phase that began at each mark but the last."""
        self._work = PlannedWork()
        timeline.mark()

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """The time inside is this phase's, except what an inner phase takes."""
        self._switch_from(self._inside[-1])
        self._inside.append(name)
        try:
            yield
        finally:
            self._switch_from(self._inside.pop())

    def _switch_from(self, ended: Phase) -> None:
        self._timeline.mark()
        self._begun.append(ended)

    def planned(self, work: PlannedWork) -> None:
        """Take what the batch is to be."""
        self._work = work

    def end_batch(self, index: int, sum_over_ranks: Callable[[Tensor], Tensor]) -> None:
        """Gather the ranks' times and report them. Collective."""
        work = self._work
        self._switch_from(self._inside[-1])
        own = dict.fromkeys(PHASES, 0.0)
        for phase, seconds in zip(self._begun, self._timeline.seconds(), strict=True):
            own[phase] += seconds
        self._begun = []
        table = torch.zeros(self._world_size, len(PHASES) + 1, dtype=torch.float64)
        table[self._rank] = torch.tensor([*own.values(), work.own_tokens], dtype=torch.float64)
        rows = sum_over_ranks(table).tolist()
        tokens = sum(work.lengths)
        room = work.num_micro_batches * self._world_size * self._max_tokens_per_micro_batch
        passes = 4 if work.first_pass else 3
        self._report(
            BatchProfile(
                batch=index,
                rank_seconds=[dict(zip(PHASES, row[:-1], strict=True)) for row in rows],
                rank_tokens=[int(row[-1]) for row in rows],
                tokens=tokens,
                num_micro_batches=work.num_micro_batches,
                packing_efficiency=tokens / max(1, room),
                padding_efficiency=tokens / max(1, len(work.lengths) * max(work.lengths, default=0)),
                flops=passes * self._cost.forward(work.lengths) - 2 * self._cost.forward(work.still_lengths),
                peak_flops=self._peak_flops,
            )
        )
