"""The settings of one simulated run. Times are in seconds, lengths in tokens."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Action tokens of an episode: lognormal, a share of them ``tail_factor`` times as long, cut at ``most``."""

    mean: float = 1000.0
    sigma: float = 0.8
    """Deviation of the logarithm; 0: all are equally long."""
    tail_share: float = 0.0
    tail_factor: float = 10.0
    pareto: float = 0.0
    """Exponent (above 1) of a Pareto distribution instead of the lognormal one; 0: lognormal."""
    most: int = 4096

    def draw(self, rng: np.random.Generator, num: int) -> NDArray[np.float64]:
        """Draw ``num`` lengths, at least 1."""
        if self.pareto:
            lengths = (1 + rng.pareto(self.pareto, num)) * self.mean * (self.pareto - 1) / self.pareto
        else:
            lengths = np.exp(rng.normal(0.0, 1.0, num) * self.sigma - self.sigma**2 / 2) * self.mean
        lengths = np.where(rng.random(num) < self.tail_share, lengths * self.tail_factor, lengths)
        return np.clip(np.rint(lengths), 1, self.most)

    def expected(self) -> float:
        """Return the mean length after the cut, from a million of them."""
        return float(self.draw(np.random.default_rng(0), 1_000_000).mean())


@dataclass(frozen=True, kw_only=True)
class Spot:
    """How rollouts are lost; a new pod starts at once for each lost one."""

    per_hour: float = 0.0
    """Losses of each pod, Poisson."""
    notice_share: float = 0.5
    """Share of losses with a notice: all work is handed back. Without, leases end late and unfinished chunks are lost."""
    mass_at_s: float = 0.0
    mass_share: float = 0.0
    """At ``mass_at_s`` this share of the pods disappears, without notice."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """The job, its rollouts and its learner."""

    group_size: int = 8
    groups_per_batch: int = 32
    max_lag: int = 4
    step_s: float = 60.0
    """Training on one batch until its version is published."""
    step_sigma: float = 0.05
    """Deviation of the logarithm of one step's time."""
    fetch_s: float = 5.0
    """From a publication until a rollout has fetched it; uniform from half to one and a half times this."""
    pause_s: float = 2.0
    """A rollout generates nothing while it loads a version."""
    max_running: int = 8
    tokens_per_s: float = 250.0
    """Speed of a rollout with many episodes in flight."""
    stream_tokens_per_s: float = 60.0
    """Speed of one episode when there are few."""
    start_s: tuple[float, float] = (90.0, 300.0)
    """From the creation of a pod until it serves; uniform."""
    lease_s: float = 30.0
    chunk_tokens: int = 64
    lengths: Lengths = Lengths()
    spot: Spot = Spot()

    def fluid_size(self) -> float:
        """Return how many rollouts, always busy, make a batch's tokens in a learner's step, without chance waits."""
        tokens = self.group_size * self.groups_per_batch * self.lengths.expected()
        return tokens / (self.tokens_per_s * max(self.step_s - self.pause_s, 1e-9))
