"""State shared by all agents' episodes of a rollout."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from gspo_protocol.limits import TrajectoryLimits
from gspo_services.rollout.metrics import RolloutMetrics
from gspo_services.rollout.rendering import Renderer
from gspo_services.rollout.work import EpisodeIntake, PolicyEngine


@dataclass(frozen=True, kw_only=True)
class EpisodeShared:
    """Everything that an agent's episode needs besides its lease."""

    renderer: Renderer
    engine: PolicyEngine
    broker: EpisodeIntake
    may_generate: asyncio.Event
    """Cleared while the engine's weights are replaced: a new request waits, a request under way continues afterwards."""
    limits: TrajectoryLimits
    """The broker's limits for one trajectory (``gspo_protocol.limits.trajectory_limits``)."""
    chunk_tokens: int
    metrics: RolloutMetrics
    wall_s: Callable[[], float]
    """Seconds since 1970, for answers."""
    roles: Sequence[str] = ()
    """That the policy plays in an episode (``agent.roles``); none for one."""
    on_replay: Literal["replay", "restart", "fail"] = "replay"
    """What becomes of the calls and steps that an earlier run of the episode has recorded (``agent.on_replay``)."""
