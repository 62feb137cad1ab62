"""Messages of the work channel, rollout <-> broker: leases, chunks, finishes, heartbeats."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
from msgspec import Meta

from gspo_protocol import limits
from gspo_protocol.messages.base import (
    ComponentName,
    Count,
    GroupSampling,
    Message,
    Plain,
    Reason,
    Segment,
    Split,
    Version,
    VersionRun,
    check_tokens,
    require_components,
    require_plain,
    require_rewards,
    require_total,
)
from gspo_protocol.messages.experts import EXPERT_ARRAYS, check_experts
from gspo_protocol.messages.journal import JOURNAL_ARRAYS, check_journal
from gspo_protocol.messages.pieces import PIECE_ARRAYS, check_pieces

Components = Annotated[dict[ComponentName, float], Meta(max_length=limits.MAX_COMPONENTS)]


class LeaseKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The right to extend one trajectory. ``epoch`` is a fencing number: a larger one shuts out all smaller ones."""

    trajectory_id: Count
    epoch: Count


class LeaseRequest(Message, frozen=True, tag="lease_request"):
    """Rollout -> broker: room for ``capacity`` more episodes; the engine serves ``policy_version``, verified."""

    request_id: Count
    capacity: Annotated[int, Meta(ge=1, le=limits.MAX_LEASES_PER_MESSAGE)]
    policy_version: Version


class Lease(Message, frozen=True, tag="lease"):
    """Broker -> rollout: extend this trajectory. With acknowledged tokens (``num_tokens`` > 0) it resumes there.

    Arrays: all acknowledged tokens of the trajectory so far, its pieces (``gspo_protocol.messages.pieces``), and its journal
    (``gspo_protocol.messages.journal``).
    """

    ARRAYS: ClassVar[dict[str, str]] = {
        "token_ids": "int32", "logprobs": "float32", **PIECE_ARRAYS, **JOURNAL_ARRAYS,
    }  # fmt: skip

    trajectory_id: Count
    epoch: Count
    group_id: Count
    split: Split
    task: Plain
    seed: Count
    sampling: GroupSampling
    lease_s: float
    num_tokens: Count
    state: Plain | None
    """Environment state after the acknowledged tokens; None before the first chunk."""
    turn_done: bool
    """The last action segment is complete: the environment steps next."""
    num_entries: Count = 0
    """Entries of the journal."""
    evaluation_set: Annotated[str, Meta(max_length=limits.MAX_SET_NAME)] = ""
    """The named set whose environment and sampling it has; empty for those of training."""

    def check_plain(self) -> None:
        require_plain("task", self.task, limits.MAX_TASK_BYTES)
        require_plain("state", self.state)

    def check_arrays(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        check_tokens(arrays, self.num_tokens)
        check_pieces(arrays, self.num_tokens)
        check_journal(arrays, self.num_entries)


class GroupMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One answer of a group, for whoever compares them."""

    num_tokens: Count
    """Of its last turn."""
    reward: float
    """What it is worth alone."""
    components: Components = {}
    """What that reward is made of."""


class Grade(Message, frozen=True, tag="grade"):
    """Broker -> rollout, in place of a Lease: all episodes of a group have ended; say what each is worth beside the others.

    It is a lease of one of the group's trajectories: renewed, handed back and taken back like any other, and answered with
    Graded. Array: the action tokens of each member's last turn, one member after another.
    """

    ARRAYS: ClassVar[dict[str, str]] = {"token_ids": "int32"}

    trajectory_id: Count
    epoch: Count
    group_id: Count
    task: Plain
    members: Annotated[list[GroupMember], Meta(min_length=1)]
    """By trajectory id."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all members."""
        return sum(member.num_tokens for member in self.members)

    def check_plain(self) -> None:
        require_plain("task", self.task, limits.MAX_TASK_BYTES)

    def check_arrays(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        shape = arrays["token_ids"].shape
        if shape != (self.num_tokens,):
            raise ValueError(f"array token_ids has shape {shape}, the members have {self.num_tokens} tokens")


class Graded(Message, frozen=True, tag="graded"):
    """Rollout -> broker: the answer to a Grade, with one for each member, in its order; acknowledged once durable."""

    trajectory_id: Count
    epoch: Count
    rewards: list[float]
    """What each member is trained with, in place of what it was worth alone."""
    components: list[Components]
    """What each reward is made of, without weights."""

    def __post_init__(self) -> None:
        for index, reward in enumerate(self.rewards):
            require_rewards(f"rewards[{index}]", [reward])
        for index, components in enumerate(self.components):
            require_components(f"components[{index}]", components)


class NoLease(Message, frozen=True, tag="no_lease"):
    """Broker -> rollout: the answer to a LeaseRequest that could not be filled now; ask again after ``retry_s``."""

    request_id: Count
    reason: Literal["window_full", "version_too_old", "no_prompts", "stopping", "not_serving", "slowed"]
    """not_serving: the rollout's last Heartbeat did not say that it serves a verified version. slowed: because of what this
    rollout did with its leases; docs/guide/security.md says what counts."""
    retry_s: float


class Chunk(Message, frozen=True, tag="chunk"):
    """Rollout -> broker: tokens appended to one trajectory; acknowledged once durable. Idempotent by
    (trajectory, epoch, offset). ``state`` is the environment's state after these tokens; None: unchanged.
    """

    ARRAYS: ClassVar[dict[str, str]] = {"token_ids": "int32", "logprobs": "float32"}
    OPTIONAL_ARRAYS: ClassVar[dict[str, str]] = EXPERT_ARRAYS

    trajectory_id: Count
    epoch: Count
    offset: Count
    num_tokens: Annotated[int, Meta(ge=1, le=limits.MAX_CHUNK_TOKENS)]
    segments: Annotated[list[Segment], Meta(min_length=1, max_length=limits.MAX_SEGMENTS)]
    version_runs: Annotated[list[VersionRun], Meta(min_length=1, max_length=limits.MAX_RUNS)]
    state: Plain | None = None
    turn_done: bool = False
    turn_rewards: Annotated[list[float], Meta(max_length=limits.MAX_TURNS)] = []
    """Rewards of the turns that were completed since the chunk before it."""

    def __post_init__(self) -> None:
        require_rewards("turn_rewards", self.turn_rewards)
        for index, segment in enumerate(self.segments):
            if segment.kind == "discarded":
                raise ValueError(f"segments[{index}] is discarded: only the end of an episode says which turns are")
        require_total(self.num_tokens, self.segments, self.version_runs)

    def check_plain(self) -> None:
        require_plain("state", self.state, limits.MAX_STATE_BYTES)

    def check_arrays(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        check_tokens(arrays, self.num_tokens)
        check_experts(arrays, sum(each.num_tokens for each in self.segments if each.kind == "action"))


class Finish(Message, frozen=True, tag="finish"):
    """Rollout -> broker: the episode is complete; ``num_tokens`` is its whole length."""

    trajectory_id: Count
    epoch: Count
    num_tokens: Annotated[int, Meta(ge=1)]
    reason: Literal["done", "length"]
    turn_rewards: Annotated[list[float], Meta(min_length=1, max_length=limits.MAX_TURNS)]
    """One finite reward per action turn; their sum is the trajectory's reward."""
    discarded_turns: Annotated[list[Annotated[int, Meta(ge=0, lt=limits.MAX_TURNS)]], Meta(max_length=limits.MAX_TURNS)] = []
    """Turns that an agent took and then, run again after a kill, did not take: nothing of them is trained on."""
    components: Components = {}
    """What the reward is made of, without weights, for the metrics; empty for a reward that came as one number."""
    turn_roles: Annotated[list[Annotated[int, Meta(ge=0, lt=limits.MAX_ROLES)]], Meta(max_length=limits.MAX_TURNS)] = []
    """The role that the policy played in each turn, as its place in agent.roles; empty: it has one role."""

    def __post_init__(self) -> None:
        require_rewards("turn_rewards", self.turn_rewards)
        if self.turn_roles and len(self.turn_roles) != len(self.turn_rewards):
            raise ValueError(f"turn_roles has {len(self.turn_roles)} turns, turn_rewards {len(self.turn_rewards)}")
        require_components("components", self.components)


class Release(Message, frozen=True, tag="release"):
    """Rollout -> broker: hands a lease back; the trajectory resumes elsewhere from its last acknowledged token.

    ``failed``: the episode itself failed here (counted as an attempt); otherwise the rollout drains.
    """

    trajectory_id: Count
    epoch: Count
    reason: Reason
    failed: bool


class LeaseEnded(Message, frozen=True, tag="lease_ended"):
    """Broker -> rollout: this lease is not valid, or no longer: stop that episode, its tokens will not be accepted."""

    trajectory_id: Count
    epoch: Count
    reason: Reason


RolloutStatus = Literal["starting", "verifying", "serving", "draining", "quarantined"]
"""What a rollout reports about itself: it has no weights yet; loads its first ones; serves a verified version; hands
everything back and ends; its engine does not hold what was sent. services/broker/ledger/fleet.py has the broker's table of
which state may follow which."""


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """Rollout -> broker, about every second: renews exactly the leases it names, and says what the engine serves.

    Learner -> broker, also while it trains: the learner is alive and keeps the run. It names no leases.
    """

    policy_version: Version
    status: RolloutStatus
    leases: Annotated[list[LeaseKey], Meta(max_length=limits.MAX_LEASES_PER_MESSAGE)]


class Pulse(Message, frozen=True, tag="pulse"):
    """Broker -> peer: the answer to a Heartbeat; also sent unasked, as a hint, when a version is published."""

    policy_version: Version
    weights_endpoint: str
    stopping: bool = False
