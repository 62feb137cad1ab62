"""What the broker knows durably: one frozen struct for each kind of row. The ledger's state consists of these same rows, so
memory and disk cannot drift apart, and recovery reads them back.
"""

from typing import Annotated, Final, Literal

import msgspec

from gspo_protocol.messages import GroupSampling, Split, TrainingValues
from gspo_protocol.messages.experts import ModelExperts

GroupStatus = Literal[
    "open", "complete", "batched", "dropped", "evaluated", "filtered", "quarantined", "requeued", "resampled"
]  # fmt: skip
"""filtered: its rewards were all equal, and another prompt took its place (dynamic sampling); quarantined: its batch ended
the learner again and again; requeued: an operator requeued its batch, and it waits for room; resampled: it was too old by
then, and another group has its prompt."""
TrajectoryStatus = Literal["free", "leased", "ended", "finished", "failed"]
"""ended: its episode has ended, and its group is not graded yet (``reward.group``). The member that ended last is free or
leased instead: whoever leases it grades the group."""
DropReason = Literal["stale", "failed"]
FileName = Annotated[str, msgspec.Meta(pattern=r"^(?!\.\.?$)[^/\x00]{1,255}$")]
"""A file's name in one folder: a ledger may be anybody's."""
NO_TURN: Final = -1


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all rows."""


class GroupRow(Row, frozen=True, kw_only=True):
    """One prompt and the trajectories sampled for it. In memory while ``open`` or ``complete``."""

    group_id: int
    split: Split
    prompt: int
    """Position in the order of prompts (train) or among the held-out tasks (eval)."""
    task_index: int
    evaluation: int | None
    """The evaluation it belongs to; None for training."""
    status: GroupStatus
    sampling: GroupSampling
    """The sampling of all its trajectories, whatever the schedules say later."""
    batch: int | None = None
    """The batch it went into, also when that was quarantined; None before, and for dropped and held-out groups."""
    drop_reason: DropReason | None = None
    replaces: int | None = None
    """The resampled group whose prompt this one has."""


class TrajectoryRow(Row, frozen=True, kw_only=True):
    """One episode: how far it is acknowledged, which session may extend it, and which versions made it."""

    trajectory_id: int
    group_id: int
    status: TrajectoryStatus = "free"
    epoch: int = 0
    holder_peer: str = ""
    """Peer and session that hold the lease; empty without a lease."""
    holder_session: str = ""
    lease_version: int = 0
    """Lower bound of the versions that the holder will still generate; 0 without a lease."""
    lease_start: int = 0
    """Acknowledged tokens at the grant: the holder's first offset."""
    attempts: int = 0
    """Failed attempts, not counting leases that expired or were handed back."""
    lost_by: tuple[tuple[str, str], ...] = ()
    """Lives (peer, tag of the session) that ended while they held it, one after the other, before a new token of it; see
    ``ledger.losses``."""
    num_tokens: int = 0
    num_action_tokens: int = 0
    version_sum: int = 0
    """Sum over action tokens of the version that made them: gives the mean lag."""
    min_version: int = 0
    """Oldest version of an action token; 0 without any."""
    num_turns: int = 0
    """Highest action turn + 1."""
    num_segments: int = 0
    """Segments, with adjacent ones of the same turn and kind merged."""
    num_runs: int = 0
    """Version runs, merged likewise."""
    last_version: int = 0
    """Version of the last token; -1 if it is an observation, 0 without any tokens."""
    last_sequence: int = 0
    """The sequence of the last token."""
    sequences: tuple[tuple[int, int], ...] = ()
    """Of a trajectory with several sequences: each one's tokens, and its turn under way or NO_TURN. Otherwise empty."""
    num_entries: int = 0
    """Entries of its journal."""
    journal_bytes: int = 0
    """Bytes of the entries."""
    reward_size: float = 0.0
    """Sum of the absolute rewards of the turns that chunks have completed."""
    finish_reason: Literal["done", "length"] | None = None
    """How its episode ended; None before."""
    turn_rewards: tuple[float, ...] = ()
    """Rewards of the ended episode's turns; empty before. With ``reward.group`` they are what it is worth alone until it is
    finished; then the last turn has its reward beside the others, and the other turns have 0."""
    discarded_turns: tuple[int, ...] = ()
    """Turns of the finished episode that are not trained on."""
    components: dict[str, float] = {}
    """What the finished episode's reward is made of, without weights."""
    turn_roles: tuple[int, ...] = ()
    """The role that the policy played in each turn of the ended episode; empty where it has one."""

    @property
    def reward(self) -> float:
        return sum(self.turn_rewards)

    @property
    def awaits_grade(self) -> bool:
        """Whether it is leased, or can be, to grade its group."""
        return self.finish_reason is not None and self.status in ("free", "leased")

    @property
    def last_turn(self) -> int:
        """The last turn of the ended episode that is trained on."""
        return max(set(range(self.num_turns)) - set(self.discarded_turns))

    @property
    def sequence_states(self) -> tuple[tuple[int, int], ...]:
        """Each sequence's tokens, and its turn under way: the turn of its last token, or NO_TURN after an observation."""
        if self.sequences or not self.num_tokens:
            return self.sequences
        return ((self.num_tokens, self.num_turns - 1 if self.last_version > 0 else NO_TURN),)


class JournalRow(Row, frozen=True, kw_only=True):
    """One entry of a trajectory's journal, until the trajectory's group is archived: it serves whoever goes on with it."""

    trajectory_id: int
    place: int
    entry: bytes
    """msgpack."""


class LengthStats(msgspec.Struct, frozen=True, kw_only=True):
    """How long answers are: tokens that the policy sampled, over all turns of a trajectory."""

    mean: float
    p95: int
    """At least 95 % are no longer."""
    max: int
    cut_off: float
    """The share that a limit on tokens ended."""

    def line(self, prefix: str) -> dict[str, float]:
        """The keys of metrics.jsonl."""
        return {f"{prefix}length/{name}": getattr(self, name) for name in self.__struct_fields__}


class BatchStats(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about a batch when it is assembled. A trajectory's lag is the mean over its action tokens."""

    num_groups: int
    num_trajectories: int
    num_tokens: int
    num_action_tokens: int
    mean_reward: float
    mean_lag: float
    max_lag: int
    """Largest lag of a single action token."""
    num_zero_advantage_groups: int
    """Groups whose rewards are all equal, turn by turn where turns get advantages: no advantage, no gradient."""
    components: dict[str, float] = {}
    """Mean of each component of the rewards, over the trajectories that have it."""
    adapters: dict[str, float] = {}
    """Mean reward of each of several adapters that has a group."""
    lengths: LengthStats
    num_filtered_groups: int = 0
    """Zero-advantage groups that were filtered out while the batch filled..."""
    num_filtered_tokens: int = 0
    """...and their tokens."""
    pass_rates: dict[str, float] = {}
    """Share of trajectories with a positive reward, by how the group's task did before; see ``Difficulty``."""


class BatchRow(Row, frozen=True, kw_only=True):
    """The recorded content and order of one batch; never changed once written."""

    index: int
    policy_version: int
    group_ids: tuple[int, ...]
    stats: BatchStats
    samplings: tuple[GroupSampling, ...]
    """Each group's sampling."""
    values: TrainingValues = TrainingValues()
    """What the schedules gave its optimizer steps when it was assembled."""


class VersionRow(Row, frozen=True, kw_only=True):
    """One publication."""

    policy_version: int
    endpoint: str
    digest: str
    num_bytes: int
    trained_batches: int
    vocabulary: int


class TrainedRow(Row, frozen=True, kw_only=True):
    """Batch ``index`` was trained at ``policy_version``; several rows when batches were delivered again."""

    index: int
    policy_version: int
    how: Literal["trained", "skipped"] = "trained"
    """skipped: the batch was quarantined, and the version has the weights of the one before."""


class FailureRow(Row, frozen=True, kw_only=True):
    """How often a batch has ended its learner since it was last trained."""

    index: int
    reported: int = 0
    """Learners that said why they could not train it."""
    silent: int = 0
    """Learners in a row that ended without a word while they trained it."""
    session: str = ""
    """The learner that reported last: one learner counts once."""
    reason: str = ""
    """What it said."""


class QuarantinedRow(Row, frozen=True, kw_only=True):
    """Batch ``index`` is not trained any more: it is delivered as one to be skipped. For good, also when its groups are
    requeued."""

    index: int
    policy_version: int
    """The newest version at that time."""
    reason: str


class EvaluationRow(Row, frozen=True, kw_only=True):
    """One pass over the tasks of a set. ``reward`` is the mean over finished trajectories; None while open or if none."""

    evaluation_id: int
    policy_version: int
    batch: int
    """Batches that the evaluated weights were trained on."""
    num_tasks: int
    status: Literal["open", "done"] = "open"
    reward: float | None = None
    num_finished: int = 0
    num_failed: int = 0
    name: str = ""
    """The set's name; empty for the run's own held-out tasks."""
    samples: int = 1
    """Trajectories of each task."""
    score: float | None = None
    """What the best checkpoint is chosen by (evaluation.best_by); None for a set that does not decide it."""

    @property
    def source(self) -> str:
        """Where its tasks are: "eval", or "eval/" and the name of a set."""
        return f"eval/{self.name}" if self.name else "eval"


class TaskRow(Row, frozen=True, kw_only=True):
    """A task of the training set whose last group had zero advantage, or that rests."""

    task_index: int
    num_zero_advantage: int = 0
    """Zero-advantage groups in a row."""
    rests_until: int = 0
    """It is passed over until this many batches are assembled."""


ADDED_DIRECTORY: Final = "data/added"
"""The files of added tasks, in the run's directory."""


class LevelRow(Row, frozen=True, kw_only=True):
    """The level at which a ladder's tasks are sampled, and what is known of the groups that are judged next."""

    ladder: int
    """Its number among the environment's ladders."""
    level: int
    num_groups: int = 0
    """Groups of this level since it was judged last..."""
    solved: float = 0.0
    """...and the sum of their solve rates."""


class AdditionRow(Row, frozen=True, kw_only=True):
    """Tasks that were added to the training set while the run went on."""

    number: int
    """Counted from 1."""
    source: str
    """The source that got the tasks."""
    name: FileName
    """The file's name in the run's ``data/added/``."""
    digest: str
    """The file's digest, in hexadecimal."""
    first_task: int
    """Index of the first of them; the others follow it."""
    num_tasks: int
    at_draw: int
    """The first draw that may take them."""


class CheckpointedRow(Row, frozen=True, kw_only=True):
    """All batches below ``next_batch`` are covered by a checkpoint."""

    next_batch: int


class ArchiveRow(Row, frozen=True, kw_only=True):
    """One immutable file with the tokens of groups that are out of play."""

    archive: int
    """Its number, from 1."""
    name: FileName
    """The file's name in the run's ``archive/``."""
    num_bytes: int
    sha256: str
    """Digest of the whole file, in hexadecimal."""
    num_groups: int
    num_trajectories: int
    num_tokens: int
    first_batch: int | None
    """The batches that it holds, both included; None when it holds only dropped and held-out groups."""
    last_batch: int | None


class ArchivedRow(Row, frozen=True, kw_only=True):
    """Group ``group_id`` has its tokens in an archive file, and no longer in the ledger."""

    group_id: int
    archive: int
    place: int
    """The row group of the file that holds it."""


class RunRow(Row, frozen=True, kw_only=True):
    """What is known about the run as a whole; there is one. A release ignores fields that it does not know."""

    failures_in_a_row: int = 0
    """Training groups dropped as failed since the last one that became complete."""
    stop_reason: str = ""
    """Why no further batch is assembled; empty while the run continues."""
    error: str = ""
    """The failure that stopped the run; empty when it was asked to stop, or was not."""
    learner_peer: str = ""
    """Peer and session of the learner that has the run; empty when the last one said Goodbye."""
    learner_session: str = ""
    learner_batch: int | None = None
    """The batch that was delivered to this learner last, until there is a sign that it was trained."""
    filtered_groups: int = 0
    """Zero-advantage groups filtered out since the last batch was assembled..."""
    filtered_tokens: int = 0
    """...and their tokens."""
    num_passed_over: int = 0
    """Draws that no prompt took, because their tasks rested."""
    data_digest: str = ""
    """Digest of the training tasks' identities at the first start; empty without identities."""
    batches_without_signal: int = 0
    """Trained batches in a row in which no answer had an advantage, since the last one that had a signal or stop..."""
    had_signal: bool = False
    """...and whether there ever was one."""
    begun_on: str = ""
    """The day of the first start, which templates may write: all prompts of a run have the same."""
    experts: ModelExperts | None = None
    """What a learner has told of the experts that engines report; None: nothing."""


class LedgerContents(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a ledger is restored from: the rows that are still in play, and where the counters stand."""

    groups: tuple[GroupRow, ...] = ()
    """Open and complete ones, by id."""
    trajectories: tuple[TrajectoryRow, ...] = ()
    """The trajectories of ``groups``, by id."""
    batches: tuple[BatchRow, ...] = ()
    """The last one and all that no checkpoint covers, by index."""
    versions: tuple[VersionRow, ...] = ()
    """The newest ones, oldest first."""
    trained: tuple[TrainedRow, ...] = ()
    """Trainings of batches that no checkpoint covers, and some before."""
    evaluations: tuple[EvaluationRow, ...] = ()
    failures: tuple[FailureRow, ...] = ()
    """Of batches that no checkpoint covers."""
    quarantined: tuple[QuarantinedRow, ...] = ()
    shelved_groups: tuple[GroupRow, ...] = ()
    """Those of batches that no checkpoint covers, and all that are quarantined or requeued, by id."""
    shelved_trajectories: tuple[TrajectoryRow, ...] = ()
    """The trajectories of ``shelved_groups``, by id."""
    run: RunRow = RunRow()
    next_batch_checkpointed: int = 0
    next_group_id: int = 0
    next_trajectory_id: int = 0
    next_prompt: int = 0
    num_batched_groups: int = 0
    task_passes: dict[int, float] = {}
    """By training task: the share of its last batched group that passed. Empty where no task comes twice."""
    num_dropped: dict[str, int] = {}
    """Groups by drop reason."""
    num_filtered_groups: int = 0
    tasks: tuple[TaskRow, ...] = ()
    """Those of which there is something to know, by index."""
    levels: tuple[LevelRow, ...] = ()
    """By ladder."""
    additions: tuple[AdditionRow, ...] = ()
    """By number."""
