"""One rollout: episodes share its token rate evenly.

V is the number of tokens of an imaginary episode that has run from the beginning. An episode of n tokens that starts at V
ends at V + n, whatever happens between: one heap per rollout, no work per token. C is the integral of the version over V:
a difference of C is the sum of the versions of an episode's tokens, however often the weights changed.
"""

import heapq
import math
from dataclasses import dataclass, field

EXACT: float = 1e-6
"""Tokens within which an episode counts as finished."""


@dataclass(eq=False, slots=True)
class Trajectory:
    """One episode: ``done`` tokens are acknowledged, the sum of their versions is ``version_sum``."""

    trajectory_id: int
    group: "Group"
    length: float
    done: float = 0.0
    version_sum: float = 0.0
    min_version: int = 0
    """The oldest version of its tokens or of the engine with its lease; 0: no tokens and no lease."""
    finished: bool = False
    begin_v: float = 0.0
    begin_c: float = 0.0


@dataclass(eq=False, slots=True)
class Group:
    """G trajectories of one prompt; ``free`` holds those without a lease, the next one last."""

    group_id: int
    oldest_version: int
    trajectories: list[Trajectory] = field(default_factory=list)
    free: list[Trajectory] = field(default_factory=list)
    num_finished: int = 0

    @property
    def complete(self) -> bool:
        return self.num_finished == len(self.trajectories)


class Engine:
    """A rollout that serves; its owner calls ``advance`` before any other call."""

    __slots__ = ("at", "c", "made", "paused", "rate", "running", "stamp", "stream", "total", "v", "version")

    def __init__(self, now: float, version: int, *, total: float, stream: float) -> None:
        self.at, self.v, self.c, self.rate = now, 0.0, 0.0, 0.0
        self.version, self.total, self.stream = version, total, stream
        self.running: list[tuple[float, int, Trajectory]] = []
        self.paused = False
        self.made = 0.0
        """Tokens generated here."""
        self.stamp = 0
        """Grows with every change of the next end; an event with an older number is void."""

    def advance(self, now: float) -> None:
        """Generate until ``now``."""
        given = self.rate * (now - self.at)
        self.v += given
        self.c += given * self.version
        self.made += given * len(self.running)
        self.at = now

    def add(self, trajectory: Trajectory) -> None:
        assert trajectory.done < trajectory.length, f"trajectory {trajectory.trajectory_id} has all its tokens"
        trajectory.begin_v, trajectory.begin_c = self.v, self.c
        end = self.v + trajectory.length - trajectory.done
        heapq.heappush(self.running, (end, trajectory.trajectory_id, trajectory))

    def take_finished(self) -> list[Trajectory]:
        """Return the trajectories that have all their tokens; their version sums are complete."""
        finished = []
        while self.running and self.running[0][0] <= self.v + EXACT:
            trajectory = heapq.heappop(self.running)[2]
            self._credit(trajectory, trajectory.length - trajectory.done, self.v - trajectory.begin_v)
            finished.append(trajectory)
        return finished

    def take_all(self, chunk_tokens: int) -> list[Trajectory]:
        """Return the unfinished trajectories, of which whole chunks count (1: all tokens)."""
        left = [trajectory for _, _, trajectory in self.running]
        self.running = []
        for trajectory in left:
            made = self.v - trajectory.begin_v
            self._credit(trajectory, math.floor(made / chunk_tokens + EXACT) * chunk_tokens, made)
        return left

    def _credit(self, trajectory: Trajectory, tokens: float, made: float) -> None:
        if tokens > 0:
            trajectory.version_sum += (self.c - trajectory.begin_c) * tokens / made
            trajectory.done += tokens

    def next_end(self) -> float | None:
        """Set the rate for the running episodes; return when the next one ends, or None without any."""
        self.stamp += 1
        if self.paused or not self.running:
            self.rate = 0.0
            return None
        self.rate = min(self.stream, self.total / len(self.running))
        return self.at + max(self.running[0][0] - self.v, 0.0) / self.rate
