"""What the fleet does: how long episodes are, and what the run's settings must be for it."""

from dataclasses import dataclass
from typing import Any, Final

EPISODES: Final = 64
"""Of each rollout at a time: the default of ``rollout.max_running``."""
SHORTEST: Final = 2
LONGEST: Final = 128
TAIL: Final = 1.5
"""Exponent of the lengths' Pareto distribution: below 2, so that its variance has no bound but LONGEST."""
GROUP_SIZE: Final = 8
MAX_LAG: Final = 63
"""Large, with small batches: the window holds twice what the fleet plays, and versions come every few seconds."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What each rollout of a fleet does."""

    pace: float
    """Chunks a second; 0: as many as are acknowledged."""
    chunk_tokens: int
    episodes: int = EPISODES


def num_chunks_of(trajectory_id: int) -> int:
    """How long an episode is, in chunks. A function of its id, so that whoever goes on with it knows."""
    share = ((trajectory_id * 2654435761) % 2**32 + 0.5) / 2**32  # Knuth's hash: neighbours are far apart.
    return min(LONGEST, int(SHORTEST * share ** (-1 / TAIL)))


def groups_per_batch(rollouts: int) -> int:
    """A batch is a thirty-second of what the fleet plays at a time."""
    return max(1, rollouts * EPISODES // GROUP_SIZE // 32)


def run_settings(rollouts: int, chunk_tokens: int, lease_s: float) -> dict[str, dict[str, Any]]:
    """Settings of the broker's run, by section."""
    return {
        "run": {"num_batches": 100_000},
        "batch": {
            "group_size": GROUP_SIZE,
            "groups_per_batch": groups_per_batch(rollouts),
            "mini_batches": 1,
            "max_lag": MAX_LAG,
        },
        "sampling": {"max_turn_tokens": 1, "max_tokens": LONGEST * chunk_tokens},
        "broker": {"lease_s": lease_s},
    }
