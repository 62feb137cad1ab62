"""Whether a run stood the storm: its throughput, its memory, its files."""

import os
import statistics
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.random_kills.memory import ROLES, Life
from gspo_protocol.limits import MAX_QUEUED_BYTES
from gspo_services.shared.net.connections import MAX_HELD_BYTES
from tests.storm.run import Trained

WARM_S: Final = 60.0
"""A process that has lived for less than this is still starting."""
MIB: Final = 2**20
GROWTH: Final = 1.15
ROOM_BYTES: Final = 24 * MIB
"""Median memory of a role in the last third of the storm, against that in the first: this much more, or the factor, is
growth."""
BURST_BYTES: Final = MAX_HELD_BYTES + MAX_QUEUED_BYTES + ROOM_BYTES
"""What the largest sample may lie above the median: a flood fills the bounds of what is held for connections and waits."""


def trajectories_per_s(batches: Iterable[Trained], begin_s: float, end_s: float) -> float:
    """Trajectories trained for the first time per second between two Unix times."""
    return sum(each.num_trajectories for each in batches if begin_s <= each.time_s < end_s) / (end_s - begin_s)


@dataclass(frozen=True)
class Memory:
    """Bytes (USS) of warm processes of one role: the medians of the first and last third of the storm, and the largest."""

    role: str
    first: int
    last: int
    largest: int

    def __str__(self) -> str:
        first, last, largest = (f"{size / MIB:.0f}" for size in (self.first, self.last, self.largest))
        return f"memory of {self.role}: {first} MiB, at the end {last}, at most {largest}"

    @property
    def grew(self) -> bool:
        return self.last > max(GROWTH * self.first, self.first + ROOM_BYTES)

    @property
    def burst(self) -> bool:
        """Whether the largest is more than the bounds of the sockets allow."""
        return self.largest > self.first + BURST_BYTES


def memory_by_role(lives: Sequence[Life], begin_s: float, end_s: float) -> list[Memory]:
    """One for each role with warm processes in both thirds. Times as in ``Life.times``."""
    third = (end_s - begin_s) / 3
    found = []
    for role in ROLES:
        samples = [
            (time_s, size)
            for life in lives
            if life.role == role
            for time_s, size in zip(life.times, life.bytes, strict=True)
            if time_s - life.times[0] >= WARM_S
        ]
        first = [size for time_s, size in samples if begin_s <= time_s < begin_s + third]
        last = [size for time_s, size in samples if end_s - third <= time_s <= end_s]
        if first and last:
            largest = max(size for _, size in samples)
            found.append(Memory(role, round(statistics.median(first)), round(statistics.median(last)), largest))
    return found


@dataclass(frozen=True)
class Files:
    """What lies in a run's directory, without what is meant to grow with the run (ledger, archive, metrics, evidence).

    Of its checkpoints one counts, as large as they are on average: the best one is kept beside the newest only from the time
    when it is none of them.
    """

    number: int
    num_bytes: int
    checkpoints: int

    def __str__(self) -> str:
        return f"{self.number} with {self.num_bytes / MIB:.1f} MiB beside {self.checkpoints} checkpoints"


def files_of(directory: Path, growing: Sequence[str]) -> Files:
    """``growing``: beginnings of the names that are left out."""
    sizes, in_checkpoints, checkpoints = [], [], set()
    # Checkpoints come and go meanwhile: os.walk passes over a folder that was just removed, where rglob raises.
    for folder, _, names in os.walk(directory):
        for path in (Path(folder, name).relative_to(directory) for name in names):
            if not str(path).startswith(tuple(growing)):
                is_checkpoint = path.parts[0] == "checkpoints" and path.parts[1].startswith("version-")
                with suppress(FileNotFoundError):
                    (in_checkpoints if is_checkpoint else sizes).append((directory / path).stat().st_size)
                    checkpoints |= set(path.parts[1:2]) if is_checkpoint else set()
    share = max(1, len(checkpoints))
    return Files(
        len(sizes) + round(len(in_checkpoints) / share), sum(sizes) + round(sum(in_checkpoints) / share), len(checkpoints)
    )


def largest_median(files: Sequence[Files]) -> tuple[Files, Files]:
    """The medians of the first and of the last third of the samples."""
    third = max(1, len(files) // 3)
    return _median(files[:third]), _median(files[-third:])


def _median(files: Sequence[Files]) -> Files:
    columns = ((each.number, each.num_bytes, each.checkpoints) for each in files)
    return Files(*(round(statistics.median(column)) for column in zip(*columns, strict=True)))
