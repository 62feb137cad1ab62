"""What determines a run: its own settings, and the events that happen to it."""

from dataclasses import dataclass, field, replace
from typing import Literal

STANDBY = "learner-standby"


def kind_of(name: str) -> str:
    """The kind of process that runs on a host of this name."""
    return name.split("-")[0]


Kind = Literal[
    "kill",
    "kill_when",
    "terminate",
    "suspend",
    "standstill",
    "partition",
    "half_open",
    "loss",
    "duplication",
    "slow",
    "disk_full",
    "engine_fails",
    "engine_fails_update",
    "engine_damages",
    "engine_dies",
    "engine_lies",
    "rewards_fail",
    "leave",
    "join",
    "second_learner",
    "takeover",
    "second_rollout",
    "corrupt",
    "damage_checkpoint",
    "poison",
    "deadly",
    "requeue",
    "hostile",
    "damage",
    "restore",
    "stop",
]
Poison = Literal["raises", "dies", "unreadable"]
"""What a batch does: its training raises, its learner dies without a word, or the broker cannot read it."""
Agents = Literal["", "replay", "restart"]
Point = Literal[
    "chunk received",
    "committed",
    "lease sent",
    "grade sent",
    "graded received",
    "batch sent",
    "part sent",
    "acknowledged",
    "publishing",
    "saving",
    "loading",
    "batch failed",
    "archive written",
    "archived",
    "publication received",
    "report received",
    "checkpoint received",
    "welcomed",
]


@dataclass(frozen=True, kw_only=True)
class Event:
    """``at`` and ``seconds`` are virtual. ``target`` is a process, or two for a partition."""

    at: float
    kind: Kind
    target: tuple[str, ...] = ()
    seconds: float = 0.0
    amount: float = 0.0
    point: Point | None = None
    """For kill_when: the next such moment after ``at``; the kill comes ``amount`` seconds later."""

    def __str__(self) -> str:
        target = " and ".join(self.target)
        moment = f"when {self.point}" if self.point else ""
        words = [
            self.kind,
            target,
            moment,
            f"for {self.seconds:.1f} s" if self.seconds else "",
            f"({self.amount:.2f})" if self.amount else "",
        ]
        return " ".join(word for word in words if word)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that determines a run."""

    seed: int
    num_batches: int
    group_size: int
    groups_per_batch: int
    max_lag: int
    checkpoint_every_batches: int
    evaluate_every_batches: int
    num_eval_tasks: int
    chunk_tokens: int
    max_turn_tokens: int
    max_tokens: int
    max_turns: int
    slow_rewards: bool
    num_rollouts: int
    max_running: int
    lease_s: float
    max_attempts: int
    commit_interval_s: float
    pause_mode: Literal["retract", "in_place"]
    token_s: float
    batch_s: float
    has_tables: bool = False
    """Whether the model is large enough that its versions travel as deltas."""
    is_deterministic: bool = True
    """Whether training a batch again gives the same weights."""
    shares_weights: bool = False
    """Whether rollouts fetch weights from each other."""
    agents: Agents = ""
    """Whether agents play the episodes; then, what becomes of what they have asked before (``agent.on_replay``)."""
    compares: bool = False
    """Whether ``reward.group`` compares the answers of each group."""
    reads_clock: bool = False
    """Whether agents do something else when they run again."""
    schedules: bool = False
    """Whether lengths, temperature and learning rate change with each batch."""
    max_filtered: float = 0.0
    """With dynamic sampling: ``data.max_filtered``; 0: without."""
    num_tasks: int | None = None
    """Training tasks; None: without end."""
    rest_after_groups: int = 0
    """``data.rest_after_groups``"""
    part_tokens: int = 2**18
    """Tokens of a batch's parts."""
    archives: bool = False
    """Whether tokens move from the ledger into archive files."""
    events: tuple[Event, ...] = field(default=())

    def with_events(self, events: tuple[Event, ...]) -> "Plan":
        return replace(self, events=events)
