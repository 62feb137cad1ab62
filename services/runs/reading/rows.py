"""What a run's files say, as typed rows. Rows of the ledger that need nothing added stay as they are
(``gspo_services.broker.rows``): EvaluationRow, VersionRow, QuarantinedRow."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gspo_protocol.messages import Segment, Split, VersionRun
from gspo_services.broker.rows import BatchStats, DropReason, GroupStatus, TrajectoryStatus
from gspo_services.shared.settings import Settings

Bools = NDArray[np.bool_]
Whole = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What is known about a run as a whole."""

    directory: Path
    run_id: str
    settings: Settings | None
    """None when settings.json is missing or of another release; ``settings_error`` says why."""
    settings_error: str
    is_live: bool
    """Whether a broker on this machine has the ledger open."""
    num_batches: int
    """Batches that were assembled."""
    num_trained: int
    """Batches that were trained at least once."""
    policy_version: int
    """The newest one that was published; 0 before the first."""
    num_groups: int
    num_trajectories: int
    """Counted by the largest id, so that a million cost nothing."""
    stop_reason: str
    """Why no further batch is assembled; empty while there is no reason."""
    error: str
    """The failure that stopped the run; empty without one."""


@dataclass(frozen=True, kw_only=True)
class RecordedBatch:
    """One assembled batch."""

    index: int
    policy_version: int
    """The version it was assembled for: lag is counted from it."""
    group_ids: tuple[int, ...]
    stats: BatchStats
    trained_versions: tuple[int, ...]
    """Versions that its training made, in order: several when it was trained again after a restart; 0 for a training
    that made none."""
    quarantined: str
    """Why it is not trained any more; empty for any other batch."""


@dataclass(frozen=True, kw_only=True)
class RecordedTrajectory:
    """One episode, without its tokens (``OpenRun.tokens``)."""

    trajectory_id: int
    group_id: int
    status: TrajectoryStatus
    finish_reason: str | None
    """done or length; None while its episode has not ended."""
    reward: float | None
    """Sum over turns; None while it has not finished, or its group is not graded yet."""
    turn_rewards: tuple[float, ...]
    components: Mapping[str, float]
    """What the reward is made of, without weights."""
    discarded_turns: tuple[int, ...]
    """Turns that are not trained on."""
    turn_roles: tuple[int, ...]
    """The role that the policy played in each turn, as its place in agent.roles; empty where it has one."""
    num_tokens: int
    num_action_tokens: int
    num_turns: int
    min_version: int
    """Oldest version of an action token; 0 without any."""
    mean_version: float | None
    """Mean version of the action tokens; None without any."""
    lag: float | None
    """Mean lag over the action tokens, counted from the version of its batch; None outside a batch."""
    epoch: int
    """Leases that were granted for it, without the first's number: the newest lease's epoch."""
    attempts: int
    """Attempts that failed."""
    holder: str
    """The rollout that has it now; empty without a lease."""


@dataclass(frozen=True, kw_only=True)
class RecordedGroup:
    """One prompt with the trajectories sampled for it, in their order."""

    group_id: int
    split: Split
    task_index: int
    prompt: int
    """Position in the order of prompts, or among the held-out tasks."""
    status: GroupStatus
    batch: int | None
    """The batch it went into; None for any other group."""
    policy_version: int | None
    """The version of that batch, or of its evaluation."""
    evaluation: int | None
    drop_reason: DropReason | None
    replaces: int | None
    """The resampled group whose prompt it has."""
    members: tuple[RecordedTrajectory, ...]


@dataclass(frozen=True, kw_only=True)
class RecordedChunk:
    """A streamed part of a trajectory: what one acknowledgement covered."""

    start: int
    num_tokens: int
    epoch: int
    """Of the lease under which it came."""
    peer: str
    """The rollout that made it."""
    turn_done: bool
    version_runs: tuple[VersionRun, ...]


@dataclass(frozen=True, kw_only=True)
class RecordedLease:
    """Consecutive chunks under one lease. A lease that brought no token leaves no trace but a gap in the numbers."""

    epoch: int
    peer: str
    """The rollout that had it."""
    start: int
    num_tokens: int
    num_chunks: int
    skipped_epochs: int
    """Leases between the one before it and this one that brought no token."""


@dataclass(frozen=True, kw_only=True)
class RecordedTokens:
    """All acknowledged tokens of a trajectory, in its order; arrays have one entry a token, [T]."""

    trajectory_id: int
    token_ids_T: NDArray[np.int32]
    logprobs_T: NDArray[np.float32]
    """The engine's, when it sampled the token; 0 for observations."""
    versions_T: Whole
    """The policy version that made the token; -1 for observations."""
    is_action_T: Bools
    """Sampled by the policy."""
    is_trained_T: Bools
    """Sampled by the policy, for a turn that is trained on."""
    turns_T: Whole
    """Turns that are complete before the token."""
    sequences_T: Whole
    """The sequence of the trajectory that the token belongs to."""
    epochs_T: Whole
    """The lease under which it came."""
    segments: tuple[Segment, ...]
    chunks: tuple[RecordedChunk, ...]
    leases: tuple[RecordedLease, ...]

    @property
    def num_tokens(self) -> int:
        """Number of tokens, T."""
        return int(self.token_ids_T.shape[0])
