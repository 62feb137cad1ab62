"""The audit's own books: what was seen to be committed, generated, delivered and published."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import msgspec

from gspo_protocol.codec import Array
from gspo_protocol.messages import AnyMessage, Batch, BatchPart, GroupSampling, Segment, VersionRun
from gspo_services.broker.ledger.sampling.task_order import TaskOrder
from gspo_services.broker.rows import (
    BatchRow,
    GroupRow,
    QuarantinedRow,
    RunRow,
    TaskRow,
    TrainedRow,
    TrajectoryRow,
    VersionRow,
)
from gspo_services.broker.store.payload import StoredChunk
from tests.simulation.agents.chat import Conversation
from tests.simulation.audit.runs import AgentRun
from tests.simulation.audit.sequences import Sequences
from tests.simulation.episodes import SimOptions
from tests.simulation.loop import Process
from tests.simulation.plan import Point, Poison

COMPARED = "G2 a group is trained with the rewards that its answers have beside each other"
SAME_CONTEXT = "G4 a token is trained in the context in which it was sampled"


@dataclass(frozen=True)
class Violation:
    """A promise that was broken: ``invariant`` is its short name, ``text`` says how."""

    invariant: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The run's settings that the audit needs."""

    seed: int
    num_batches: int
    group_size: int
    groups_per_batch: int
    max_lag: int
    max_attempts: int
    max_filtered: int
    """Groups that one batch may filter out; 0: none."""
    num_tasks: int | None
    rest_after_groups: int
    """A task rests after so many zero-advantage groups in a row; 0: none does..."""
    rest_batches: int
    """...for so many batches."""
    is_deterministic: bool
    """Training a batch again gives the same weights."""
    options: SimOptions
    agents: bool
    """Agents play the episodes, and not the environment."""
    reads_clock: bool
    """Agents do not repeat what they did."""
    compares: bool
    """The answers of a group are graded together."""
    replays: bool
    """What an agent repeats is answered from the record."""


@dataclass
class Durable:
    """What was committed."""

    groups: dict[int, GroupRow] = field(default_factory=dict)
    trajectories: dict[int, TrajectoryRow] = field(default_factory=dict)
    chunks: dict[int, list[StoredChunk]] = field(default_factory=dict)
    journals: dict[int, list[bytes]] = field(default_factory=dict)
    """Entries by trajectory, until its group is archived."""
    granted: dict[int, int] = field(default_factory=dict)
    """By trajectory: the version of the engine that got its last lease."""
    batches: dict[int, BatchRow] = field(default_factory=dict)
    versions: dict[int, VersionRow] = field(default_factory=dict)
    trained: list[TrainedRow] = field(default_factory=list)
    quarantined: dict[int, QuarantinedRow] = field(default_factory=dict)
    next_batch_checkpointed: int = 0
    run: RunRow = field(default_factory=RunRow)
    tasks: dict[int, TaskRow] = field(default_factory=dict)
    num_prompts: int = 0
    """Prompts that were drawn..."""
    num_passed_over: int = 0
    """...and draws that none of them took."""

    @property
    def newest_version(self) -> int:
        return max(self.versions, default=0)

    @property
    def num_trained(self) -> int:
        return self.versions[self.newest_version].trained_batches if self.versions else 0

    @property
    def next_version(self) -> int:
        return self.newest_version + len(self.batches) - self.num_trained

    def num_tokens(self, trajectory_id: int) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks.get(trajectory_id, ()))


class Books:
    """What all parts of the audit have in common."""

    def __init__(self, rules: Rules, happened: Counter[str], report: Callable[[Violation], None]) -> None:
        """``report`` is called with each violation."""
        self.rules = rules
        self.happened = happened
        self.report = report
        self.durable = Durable()
        self.published: dict[int, bytes] = {}
        """By version that a learner was about to publish: all its bytes."""
        self.served: defaultdict[str, set[int]] = defaultdict(set)
        """By session: versions that its engine has really loaded."""
        self.divergences: Counter[str] = Counter()
        """By session: how often its agents did not repeat what they did."""
        self.poison: dict[int, Poison] = {}
        """By batch: what it does to whoever handles it."""
        self.deadly: set[int] = set()
        """Trajectories that end every rollout that samples them."""
        self.superseded: set[str] = set()
        """Sessions that may be told that they were replaced."""
        self.dies: Callable[[Process], None] = lambda _: None
        """Called when a process is killed by what it does."""
        self.now: Callable[[], float] = lambda: 0.0
        self.passes: Callable[[Point], None] = lambda _: None
        """Called at the moments at which the weather may strike."""
        self.made: defaultdict[int, defaultdict[int, set[tuple[int, float, int]]]] = defaultdict(lambda: defaultdict(set))
        """By trajectory and context: what engines made there, with the epoch (a fencing number); several when a lease came
        twice."""
        self.begun: defaultdict[int, defaultdict[Conversation, set[int]]] = defaultdict(lambda: defaultdict(set))
        """By trajectory and question of an agent: the contexts in which an engine began to answer it."""
        self.ended: defaultdict[int, defaultdict[Conversation, set[tuple[int, int]]]] = defaultdict(lambda: defaultdict(set))
        """By trajectory and conversation up to an answer that its agent got: the contexts after it, and its last token."""
        self.logs: dict[int, Sequences] = {}
        self.samplings: dict[tuple[int, int], GroupSampling] = {}
        """By trajectory and epoch: how the lease wants it sampled."""
        self.leased: dict[tuple[int, int], tuple[int, int]] = {}
        """By trajectory and epoch: how many tokens and entries of the journal the lease brought."""
        self.alone: dict[int, TrajectoryRow] = {}
        """By trajectory: its row when its episode ended, with what it is worth alone."""
        self.runs: defaultdict[tuple[int, int], list[AgentRun]] = defaultdict(list)
        """By trajectory and epoch."""
        self.unacknowledged: defaultdict[str, dict[int, list[AnyMessage]]] = defaultdict(dict)
        self.heard: defaultdict[str, set[int]] = defaultdict(set)
        """By session: sequence numbers that a broker has received."""
        self.sessions: dict[bytes, str] = {}
        self.contents: dict[int, tuple[int, bytes]] = {}
        """By batch: the version it was assembled for, and what it consists of."""
        self.parts: dict[tuple[int, int], bytes] = {}
        """By batch and part: its content."""
        self.requeued: set[int] = set()
        """Groups that an operator gave back, and that are complete again."""
        self.delivered_to: defaultdict[int, set[str]] = defaultdict(set)
        """By batch: the learners that got it since it was last trained."""
        self.failed_at: defaultdict[int, set[str]] = defaultdict(set)
        """By batch: the learners whose report that they could not train it was acknowledged, since it was last trained."""
        self.num_learner_lives = 0
        """How many learners were welcomed."""
        self.holder: str | None = None
        """The session of the learner that was welcomed last; None also after its Goodbye."""
        self.num_losses = 0
        """Losses that a person has accepted, in the past that the ledger has."""
        self.order = TaskOrder(rules.seed, rules.num_tasks)
        """The task of draw 0, 1, 2, ..."""

    def require(self, holds: bool, invariant: str, text: Callable[[], str]) -> None:
        if not holds:
            self.report(Violation(invariant, text()))

    def log_of(self, trajectory_id: int) -> Sequences:
        """The sequences that are on disk."""
        log = self.logs.setdefault(trajectory_id, Sequences())
        for chunk in self.durable.chunks.get(trajectory_id, ())[log.num_chunks :]:
            log.append_chunk(chunk)
        return log

    def last_answer(self, row: TrajectoryRow) -> list[int]:
        """The tokens of the last turn that an ended episode has kept."""
        turns = [turn for turn in self.log_of(row.trajectory_id).turns() if turn.turn not in row.discarded_turns]
        last = max(turn.turn for turn in turns)
        return [token for turn in turns if turn.turn == last for token in turn.token_ids]

    def was_made(
        self, trajectory_id: int, context: int, token: int, logprob: float | None = None, epoch: int | None = None
    ) -> bool:
        """Whether an engine made the token in this context; None: whatever it is."""
        return any(
            made == token and logprob in (None, its_logprob) and epoch in (None, its_epoch)
            for made, its_logprob, its_epoch in self.made[trajectory_id].get(context, ())
        )

    def members(self, group_id: int) -> list[TrajectoryRow]:
        return [row for row in self.durable.trajectories.values() if row.group_id == group_id]


def header_of(chunk: StoredChunk) -> tuple[list[Segment], list[VersionRun]]:
    segments, runs, *_ = msgpack.unpackb(chunk.header, raw=False)
    return msgspec.convert(segments, list[Segment]), msgspec.convert(runs, list[VersionRun])


def spelt(segments: Sequence[Segment]) -> list[tuple[str, int]]:
    return [(segment.kind, segment.turn) for segment in segments for _ in range(segment.num_tokens)]


def content_of(batch: Batch | BatchPart, arrays: Mapping[str, Array]) -> bytes:
    """A batch or a part of it, with its arrays, as bytes."""
    described: dict[str, Any] = msgspec.to_builtins(batch)
    return bytes(msgpack.packb(described)) + b"".join(array.tobytes() for array in arrays.values())
