"""What must always hold, checked where it happens: at every commit, every message the broker sends, every batch trained.

The audit believes nobody. It keeps its own copy of what was committed, of what engines really generated and with which
weights, and of what was trained, and compares.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import msgpack
import msgspec
import numpy as np

from protocol.codec import Array
from protocol.messages import (
    Ack,
    AnyMessage,
    Batch,
    Checkpointed,
    Chunk,
    EndOfRun,
    Finish,
    Hello,
    Lease,
    Message,
    Published,
    Pulse,
    Refused,
    Release,
    Segment,
    Trained,
    VersionRun,
    Welcome,
)
from services.broker.payload import StoredChunk
from services.broker.records import BatchRow, EvaluationRow, GroupRow, Row, SettledRow, TrainedRow, TrajectoryRow, VersionRow
from services.broker.store import Changes
from services.broker.tasks import TaskOrder, trajectory_seed
from services.rollout.generation import Piece
from tests.simulation.episodes import SimOptions, SimTasks, expected_turns, version_in
from tests.simulation.loop import Process
from tests.simulation.weather import Point


@dataclass(frozen=True)
class Violation:
    """A promise that was broken: ``invariant`` is its short name, ``text`` says how."""

    invariant: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the audit must know of the run's settings."""

    seed: int
    num_batches: int
    group_size: int
    groups_per_batch: int
    max_lag: int
    max_attempts: int
    options: SimOptions


@dataclass
class Durable:
    """What was committed."""

    groups: dict[int, GroupRow] = field(default_factory=dict)
    trajectories: dict[int, TrajectoryRow] = field(default_factory=dict)
    chunks: dict[int, list[StoredChunk]] = field(default_factory=dict)
    batches: dict[int, BatchRow] = field(default_factory=dict)
    versions: dict[int, VersionRow] = field(default_factory=dict)
    trained: list[TrainedRow] = field(default_factory=list)
    settled: int = 0

    @property
    def newest_version(self) -> int:
        return max(self.versions, default=0)

    @property
    def next_version(self) -> int:
        trained = self.versions[self.newest_version].trained_batches if self.versions else 0
        return self.newest_version + len(self.batches) - trained

    def num_tokens(self, trajectory_id: int) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks.get(trajectory_id, ()))


class Audit:
    """Collects violations; ``report`` is called with each."""

    def __init__(self, rules: Rules, happened: Counter[str], report: Callable[[Violation], None]) -> None:
        self._rules = rules
        self._report = report
        self.happened = happened
        self.durable = Durable()
        self.published: dict[int, list[float]] = {}
        """Content of every version that a learner was about to publish."""
        self._served: defaultdict[str, set[int]] = defaultdict(set)
        """By session: versions that its engine has really held."""
        self._made: defaultdict[tuple[int, int], dict[int, tuple[int, float]]] = defaultdict(dict)
        self._unacknowledged: defaultdict[str, dict[int, AnyMessage]] = defaultdict(dict)
        self._sessions: dict[bytes, str] = {}
        self._contents: dict[int, tuple[int, bytes]] = {}
        """By batch: the version it was assembled for, and all that it holds."""
        self.num_learner_lives = 0
        self.passes: Callable[[Point], None] = lambda _: None
        """Called at the moments at which the weather may want to strike."""
        self._order = TaskOrder(rules.seed, None)

    def require(self, holds: bool, invariant: str, text: Callable[[], str]) -> None:
        if not holds:
            self._report(Violation(invariant, text()))

    # --- engines ------------------------------------------------------------------------------------------------------

    def version_of(self, version: int, content: list[float]) -> int | None:
        """The published version that ``content`` is; None when nobody published that."""
        return version if self.published.get(version) == content else None

    def loaded(self, session: str, version: int | None) -> None:
        if version is not None:
            self._served[session].add(version)

    def generated(self, process: Process, trajectory_id: int, epoch: int, position: int, piece: Piece) -> None:
        made = self._made[trajectory_id, epoch]
        versions = {run.version for run in piece.version_runs}
        self.require(
            versions <= self._served[process.session],
            "G5 only whole, published weights serve",
            lambda: (
                f"{process} generated trajectory {trajectory_id} with weights {versions}, held were "
                f"{self._served[process.session]} (0: weights that nobody published)"
            ),
        )
        for token, logprob in zip(piece.token_ids.tolist(), piece.logprobs.tolist(), strict=True):
            made[position] = (token, logprob)
            position += 1

    # --- the broker's disk ----------------------------------------------------------------------------------------------

    def committed(self, changes: Changes) -> None:
        """A transaction is durable."""
        # Groups first: a trajectory's grant is judged by its group.
        for row in changes.rows:
            if isinstance(row, GroupRow):
                self._group(row)
        for chunk in changes.chunks:
            self._chunk(chunk, changes.rows)
        for row in changes.rows:
            self._row(row)
        for row in changes.rows:
            if isinstance(row, TrajectoryRow):
                self._counts(self.durable.trajectories[row.trajectory_id])
        self.passes("committed")

    def _row(self, row: Row) -> None:
        durable = self.durable
        match row:
            case TrajectoryRow():
                self._trajectory(row)
            case VersionRow():
                self.require(
                    row.policy_version > durable.newest_version,
                    "versions grow",
                    lambda: f"version {row.policy_version} is published after {durable.newest_version}",
                )
                durable.versions[row.policy_version] = row
            case BatchRow():
                self._batch(row)
            case TrainedRow():
                durable.trained.append(row)
                self.happened["batch trained again"] += int(
                    sum(1 for other in durable.trained if other.index == row.index) > 1
                )
            case SettledRow():
                durable.settled = row.next_batch
            case EvaluationRow():
                self.happened["evaluation done"] += int(row.status == "done")
            case _:
                pass

    def _group(self, row: GroupRow) -> None:
        former = self.durable.groups.get(row.group_id)
        if former is None and row.split == "train":
            expected = sum(1 for group in self.durable.groups.values() if group.split == "train")
            self.require(
                row.prompt == expected and row.task_index == self._order.task_index(row.prompt),
                "G2 no prompt is skipped",
                lambda: f"group {row.group_id} has prompt {row.prompt} (task {row.task_index}), {expected} is next",
            )
        if former is not None:
            self.require(
                former.status in ("open", "complete"),
                "G2 exactly once",
                lambda: f"group {row.group_id} was {former.status} already, becomes {row.status}",
            )
        if row.status == "dropped":
            self.happened[f"group dropped: {row.drop_reason}"] += 1
            self.require(
                row.drop_reason == "failed" or self.num_learner_lives > 1,
                "G3 nothing is dropped as stale while versions follow each other",
                lambda: f"group {row.group_id} is dropped as stale, and the learner never restarted",
            )
        self.durable.groups[row.group_id] = row

    def _trajectory(self, row: TrajectoryRow) -> None:
        durable = self.durable
        former = durable.trajectories.get(row.trajectory_id)
        durable.trajectories[row.trajectory_id] = row
        if former is not None:
            self.require(
                row.epoch >= former.epoch and row.num_tokens >= former.num_tokens,
                "G1 nothing acknowledged is lost",
                lambda: f"trajectory {row.trajectory_id} goes back: {former} -> {row}",
            )
        granted = row.epoch - (0 if former is None else former.epoch)
        if not granted:
            return
        self.require(
            row.lease_version == 0 or row.lease_version in self._served[row.holder_session],
            "G4 only engines with a verified version get leases",
            lambda: (
                f"{row.holder_session} got trajectory {row.trajectory_id} at version {row.lease_version}, its engine "
                f"held {self._served[row.holder_session]}"
            ),
        )
        group = durable.groups[row.group_id]
        if row.status == "leased" and group.split == "train":
            oldest = max(1, durable.next_version - self._rules.max_lag)
            self.require(
                row.lease_version >= oldest,
                "G4 only engines with a verified version get leases",
                lambda: (
                    f"trajectory {row.trajectory_id} is leased at version {row.lease_version}, {oldest} is the oldest "
                    "that can be trained"
                ),
            )

    def _counts(self, row: TrajectoryRow) -> None:
        stored = self.durable.num_tokens(row.trajectory_id)
        self.require(
            stored == row.num_tokens,
            "G1 nothing acknowledged is lost",
            lambda: f"trajectory {row.trajectory_id} has {row.num_tokens} tokens in its row, {stored} in its chunks",
        )

    def _chunk(self, chunk: StoredChunk, rows: Sequence[Row]) -> None:
        stored = self.durable.num_tokens(chunk.trajectory_id)
        self.require(
            chunk.start == stored,
            "G1 nothing acknowledged is lost",
            lambda: f"trajectory {chunk.trajectory_id}: a chunk begins at {chunk.start}, {stored} tokens are stored",
        )
        former = self.durable.chunks.setdefault(chunk.trajectory_id, [])
        self.require(
            not former or chunk.epoch >= former[-1].epoch,
            "G1 one writer at a time",
            lambda: f"trajectory {chunk.trajectory_id}: epoch {chunk.epoch} writes after epoch {former[-1].epoch}",
        )
        row = next(
            (row for row in rows if isinstance(row, TrajectoryRow) and row.trajectory_id == chunk.trajectory_id),
            self.durable.trajectories.get(chunk.trajectory_id),
        )
        self.require(
            row is not None and row.epoch == chunk.epoch,
            "G1 one writer at a time",
            lambda: f"trajectory {chunk.trajectory_id}: epoch {chunk.epoch} writes, its lease is {row}",
        )
        former.append(chunk)
        self.happened["trajectory resumed"] += int(len(former) > 1 and former[-2].epoch < chunk.epoch)
        segments, runs = _header(chunk)
        self._tokens(
            chunk.trajectory_id,
            chunk.epoch,
            chunk.start,
            np.frombuffer(chunk.token_ids, "<i4").tolist(),
            np.frombuffer(chunk.logprobs, "<f4").tolist(),
            _spelt(segments),
            [run.version for run in runs for _ in range(run.num_tokens)],
        )

    def _tokens(
        self,
        trajectory_id: int,
        epoch: int,
        start: int,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        kinds: Sequence[tuple[str, int]],
        versions: Sequence[int],
    ) -> None:
        """Each action token is what this epoch's engine made there, with the version that made it."""
        made = self._made[trajectory_id, epoch]
        for place, (token, logprob, (kind, _), version) in enumerate(
            zip(token_ids, logprobs, kinds, versions, strict=True), start=start
        ):
            if kind == "observation":
                ok = version == -1 and logprob == 0.0
            else:
                ok = version == version_in(logprob) and made.get(place) == (token, logprob)
            self.require(
                ok,
                "G4 every token carries the version that made it",
                lambda: (
                    f"trajectory {trajectory_id}, epoch {epoch}, token {place}: {kind} {token}, log-prob {logprob}, version "
                    f"{version}; the engine made {made.get(place)}"
                ),
            )

    def _batch(self, row: BatchRow) -> None:
        durable = self.durable
        self.require(
            row.index == len(durable.batches),
            "G2 exactly once",
            lambda: f"batch {row.index} is assembled after {len(durable.batches)} batches",
        )
        batched = {group_id for batch in durable.batches.values() for group_id in batch.group_ids}
        for group_id in row.group_ids:
            self.require(
                group_id not in batched,
                "G2 exactly once",
                lambda: f"group {group_id} is in two batches",  # noqa: B023
            )
            members = self._members(group_id)
            self.require(
                len(members) == self._rules.group_size and all(member.status == "finished" for member in members),
                "G2 exactly once",
                lambda: f"group {group_id} is in batch {row.index} unfinished: {members}",  # noqa: B023
            )
        durable.batches[row.index] = row

    def _members(self, group_id: int) -> list[TrajectoryRow]:
        return [row for row in self.durable.trajectories.values() if row.group_id == group_id]

    # --- what the broker hears and says -------------------------------------------------------------------------------

    def broker_received(self, peer: bytes, message: AnyMessage, seq: int | None) -> None:
        if isinstance(message, Hello):
            self._sessions[peer] = message.session
        elif seq is not None and peer in self._sessions:
            self._unacknowledged[self._sessions[peer]].setdefault(seq, message)
            if isinstance(message, Chunk):
                self.passes("chunk received")

    def broker_sends(self, peer: bytes, message: Message, arrays: Mapping[str, Array] | None) -> None:
        match message:
            case Ack(next_seq=next_seq):
                self._acknowledged(self._sessions[peer], next_seq)
                self.passes("acknowledged")
            case Lease():
                assert arrays is not None
                self._leased(message, arrays)
                self.passes("lease sent")
            case Batch():
                assert arrays is not None
                self._delivered(message, arrays)
                self.passes("batch sent")
            case Welcome(policy_version=version) | Pulse(policy_version=version):
                self.require(
                    version <= self.durable.newest_version,
                    "G2 said only when durable",
                    lambda: f"version {version} is announced, {self.durable.newest_version} is committed",
                )
            case EndOfRun(reason=reason):
                durable = self.durable
                trained = durable.versions[durable.newest_version].trained_batches
                self.require(
                    trained == self._rules.num_batches,
                    "G2 exactly once",
                    lambda: f"the run ends ({reason}) with {trained} of {self._rules.num_batches} batches trained",
                )
            case Refused(fatal=True, reason=reason):
                self._report(Violation("no peer is refused for good", f"{peer.decode()}: {reason}"))
            case _:
                pass

    def _acknowledged(self, session: str, next_seq: int) -> None:
        """Whatever is acknowledged has had its effect on disk."""
        pending = self._unacknowledged[session]
        for seq in [seq for seq in pending if seq < next_seq]:
            message = pending.pop(seq)
            self.require(
                self._is_durable(session, message),
                "G1 nothing acknowledged is lost",
                lambda: f"{session}'s message {seq} is acknowledged and not on disk: {message}",  # noqa: B023
            )

    def _is_durable(self, session: str, message: AnyMessage) -> bool:
        durable = self.durable
        match message:
            case Chunk():
                return (
                    not self._holds(session, message.trajectory_id, message.epoch)
                    or durable.num_tokens(message.trajectory_id) >= message.offset + message.num_tokens
                )
            case Finish() | Release():
                return not self._holds(session, message.trajectory_id, message.epoch)
            case Published():
                return message.policy_version in durable.versions
            case Trained():
                return any(
                    (row.index, row.policy_version) == (message.index, message.policy_version) for row in durable.trained
                )
            case Checkpointed():
                return durable.settled >= message.next_batch
            case _:
                return True

    def _holds(self, session: str, trajectory_id: int, epoch: int) -> bool:
        """The lease is not over, as far as the disk knows."""
        row = self.durable.trajectories.get(trajectory_id)
        if row is None or self.durable.groups[row.group_id].status != "open":
            return False
        return row.status == "leased" and row.epoch == epoch and row.holder_session == session

    def _leased(self, lease: Lease, arrays: Mapping[str, Array]) -> None:
        durable = self.durable
        row = durable.trajectories.get(lease.trajectory_id)
        self.require(
            row is not None and row.epoch >= lease.epoch,
            "G1 one writer at a time",
            lambda: f"epoch {lease.epoch} of trajectory {lease.trajectory_id} is granted before it is durable: {row}",
        )
        chunks = [chunk for chunk in durable.chunks.get(lease.trajectory_id, ()) if chunk.epoch < lease.epoch]
        stored = b"".join(chunk.token_ids for chunk in chunks), b"".join(chunk.logprobs for chunk in chunks)
        self.require(
            stored == (arrays["token_ids"].tobytes(), arrays["logprobs"].tobytes()),
            "G1 nothing acknowledged is lost",
            lambda: f"trajectory {lease.trajectory_id} is resumed with {lease.num_tokens} tokens that are not those on disk",
        )
        self.happened["lease of begun trajectory"] += int(lease.num_tokens > 0)

    def _delivered(self, batch: Batch, arrays: Mapping[str, Array]) -> None:
        row = self.durable.batches.get(batch.index)
        self.require(
            row is not None, "G2 said only when durable", lambda: f"batch {batch.index} is delivered before it is durable"
        )
        content = (batch.policy_version, _content(batch, arrays))
        if batch.index in self._contents:
            self.happened["batch delivered again"] += 1
            self.require(
                self._contents[batch.index] == content,
                "G2 a batch is delivered again as it was",
                lambda: f"batch {batch.index} is delivered with other content",
            )
        self._contents[batch.index] = content

    # --- the learner ---------------------------------------------------------------------------------------------------

    def publishes(self, version: int, content: list[float]) -> None:
        """A learner is about to serve a version."""
        self.require(
            version not in self.published,
            "versions grow",
            lambda: f"version {version} is given to weights {content}, and was given to {self.published[version]}",
        )
        self.published[version] = content
        self.passes("publishing")

    def trains(self, history: Sequence[tuple[int, ...]], batch: Batch, arrays: Mapping[str, Array]) -> None:
        """A learner whose weights have this history trains a batch."""
        self.require(
            batch.index == len(history),
            "G2 exactly once",
            lambda: f"batch {batch.index} is trained by weights that were trained on {len(history)} batches",
        )
        known = self._contents.get(batch.index)
        self.require(
            known == (batch.policy_version, _content(batch, arrays)),
            "G2 a batch is delivered again as it was",
            lambda: f"batch {batch.index} is trained with other content than was delivered",
        )
        seen = {trajectory_id for step in history for trajectory_id in step}
        offset = 0
        for item in batch.items:
            self.require(
                item.trajectory_id not in seen,
                "G2 exactly once",
                lambda: f"trajectory {item.trajectory_id} is trained twice",  # noqa: B023
            )
            seen.add(item.trajectory_id)
            end = offset + item.num_tokens
            self._episode(batch, item.trajectory_id, arrays, slice(offset, end), item.segments, item.version_runs)
            row = self.durable.trajectories[item.trajectory_id]
            self._rewards(row, item.turn_rewards, arrays["token_ids"][offset:end].tolist(), _spelt(item.segments))
            offset = end

    def _episode(
        self,
        batch: Batch,
        trajectory_id: int,
        arrays: Mapping[str, Array],
        place: slice,
        segments: Sequence[Segment],
        runs: Sequence[VersionRun],
    ) -> None:
        chunks = self.durable.chunks[trajectory_id]
        token_ids, logprobs = arrays["token_ids"][place], arrays["logprobs"][place]
        self.require(
            token_ids.tobytes() == b"".join(chunk.token_ids for chunk in chunks)
            and logprobs.tobytes() == b"".join(chunk.logprobs for chunk in chunks),
            "G1 nothing acknowledged is lost",
            lambda: f"batch {batch.index}: trajectory {trajectory_id} is trained with other tokens than were acknowledged",
        )
        kinds = _spelt(segments)
        versions = [run.version for run in runs for _ in range(run.num_tokens)]
        for place_in, ((kind, _), version, logprob) in enumerate(zip(kinds, versions, logprobs.tolist(), strict=True)):
            true = version_in(logprob) if kind == "action" else -1
            self.require(
                version == true,
                "G4 every token carries the version that made it",
                lambda: f"trajectory {trajectory_id}, token {place_in}: version {version}, made by {true}",  # noqa: B023
            )
            self.require(
                kind == "observation" or 0 <= batch.policy_version - true <= self._rules.max_lag,
                "G3 no token older than max_lag is trained",
                lambda: (
                    f"batch {batch.index} for version {batch.policy_version}: trajectory {trajectory_id}, token "
                    f"{place_in} was made by version {true}"
                ),
            )

    def _rewards(
        self, row: TrajectoryRow, rewards: Sequence[float], token_ids: Sequence[int], kinds: Sequence[tuple[str, int]]
    ) -> None:
        """The episode is one that could have been played in one go."""
        turns: list[tuple[list[int], list[int]]] = []
        position = 0
        for turn, run in groupby(kinds, key=lambda kind: kind[1]):
            marks = [kind for kind, _ in run]
            begin = position + marks.count("observation")
            turns.append((list(token_ids[position:begin]), list(token_ids[begin : position + len(marks)])))
            position += len(marks)
            self.require(
                turn == len(turns) - 1 and marks == sorted(marks, reverse=True),
                "G2 an episode is played as in one go",
                lambda: f"trajectory {row.trajectory_id}: segments {kinds}",
            )
        group = self.durable.groups[row.group_id]
        observations, expected = expected_turns(
            SimTasks("train").task(group.task_index),
            trajectory_seed(self._rules.seed, row.trajectory_id),
            self._rules.options,
            [action for _, action in turns],
        )
        self.require(
            observations == [observation for observation, _ in turns] and expected == list(rewards),
            "G2 an episode is played as in one go",
            lambda: (
                f"trajectory {row.trajectory_id}: turns {turns}, rewards {list(rewards)}; expected observations "
                f"{observations}, rewards {expected}"
            ),
        )

    def checkpoints(self, history: Sequence[tuple[int, ...]], next_batch: int) -> None:
        """A learner saves: its history is that of the recorded batches, in order."""
        recorded = [self._trajectories_of(index) for index in range(next_batch)]
        self.require(
            list(history) == recorded,
            "G2 exactly once",
            lambda: f"a checkpoint after batch {next_batch - 1} holds the history {history}, recorded is {recorded}",
        )

    def _trajectories_of(self, index: int) -> tuple[int, ...]:
        return tuple(
            row.trajectory_id
            for group_id in self.durable.batches[index].group_ids
            for row in sorted(self._members(group_id), key=lambda row: row.trajectory_id)
        )

    # --- the end ---------------------------------------------------------------------------------------------------------

    def run_is_complete(self, history: Sequence[tuple[int, ...]]) -> None:
        """The last checkpoint's history, when the run is over."""
        durable = self.durable
        self.checkpoints(history, self._rules.num_batches)
        for group in durable.groups.values():
            if group.split == "train":
                self.require(
                    group.status in ("batched", "dropped"),
                    "G2 no prompt is skipped",
                    lambda: f"prompt {group.prompt} is {group.status} at the end",  # noqa: B023
                )


def _header(chunk: StoredChunk) -> tuple[list[Segment], list[VersionRun]]:
    segments, runs, *_ = msgpack.unpackb(chunk.header, raw=False)
    return msgspec.convert(segments, list[Segment]), msgspec.convert(runs, list[VersionRun])


def _spelt(segments: Sequence[Segment]) -> list[tuple[str, int]]:
    return [(segment.kind, segment.turn) for segment in segments for _ in range(segment.num_tokens)]


def _content(batch: Batch, arrays: Mapping[str, Array]) -> bytes:
    """Everything that a batch says, as bytes."""
    described: dict[str, Any] = msgspec.to_builtins(batch)
    return bytes(msgpack.packb(described)) + arrays["token_ids"].tobytes() + arrays["logprobs"].tobytes()
