"""What the broker says is already on its disk."""
# ruff: noqa: B023 - the text of a violation is made at once

from collections.abc import Mapping
from types import UnionType

from gspo_protocol.codec import Array
from gspo_protocol.messages import (
    Ack,
    AnyMessage,
    Batch,
    BatchFailed,
    BatchPart,
    Checkpointed,
    Chunk,
    Chunks,
    EndOfRun,
    Finish,
    Grade,
    Graded,
    Hello,
    Journal,
    Lease,
    Message,
    Published,
    Pulse,
    Refused,
    Release,
    SkipBatch,
    Trained,
    Welcome,
)
from gspo_protocol.messages.gathered import Gathered
from gspo_services.broker.ledger.quarantine import REPORTED_MOST
from gspo_services.shared.net.peer import REPLACED
from tests.simulation.audit.books import COMPARED, Violation, content_of
from tests.simulation.audit.learners import LearnerAudit
from tests.simulation.audit.schedules import ScheduleAudit
from tests.simulation.plan import Point

RECEIVED: dict[type[Message] | UnionType, Point] = {
    Chunk | Chunks: "chunk received",
    BatchFailed: "batch failed",
    Published: "publication received",
    Graded: "graded received",
    Trained: "report received",
    Checkpointed: "checkpoint received",
}
"""Messages after which the weather may strike."""


class MessageAudit(LearnerAudit, ScheduleAudit):
    """Hears what the broker hears and says."""

    def broker_received(self, peer: bytes, message: AnyMessage, seq: int | None, arrays: Mapping[str, Array]) -> None:
        self._hear(peer, message)
        if isinstance(message, Hello):
            self.sessions[peer] = message.session
        elif seq is not None and peer in self.sessions:
            self.heard[self.sessions[peer]].add(seq)
            parts = _parts_of(message, arrays)
            self.unacknowledged[self.sessions[peer]].setdefault(seq, parts)
            self.happened["many chunks in a message"] += isinstance(message, Chunks)
            for kind, point in RECEIVED.items():
                if isinstance(message, kind):
                    self.passes(point)

    def broker_sends(self, peer: bytes, message: Message, arrays: Mapping[str, Array] | None) -> None:
        match message:
            case Ack(next_seq=next_seq, session=session):
                self._acknowledged(session, next_seq)
                self.passes("acknowledged")
            case Lease():
                assert arrays is not None
                self._leased(message, arrays)
                self._journal_leased(message, arrays)
                self.leased_to_sample(message)
                self.passes("lease sent")
            case Grade():
                assert arrays is not None
                self._given_to_grade(message, arrays)
                self.passes("grade sent")
            case Batch():
                assert arrays is not None
                self._delivered(message, arrays)
                self._may_be_trained(message.index, self.sessions[peer])
                self.passes("batch sent")
            case BatchPart():
                assert arrays is not None
                self._part_delivered(message, arrays)
                self.passes("part sent")
            case SkipBatch(index=index):
                self.happened["batch skipped"] += 1
                self.require(
                    index in self.durable.quarantined,
                    "G2 said only when durable",
                    lambda: f"batch {index} is to be skipped, and it is not quarantined on disk",
                )
            case Welcome(policy_version=version) | Pulse(policy_version=version):
                self.require(
                    version <= self.durable.newest_version,
                    "G2 said only when durable",
                    lambda: f"version {version} is announced, but only {self.durable.newest_version} is committed",
                )
            case EndOfRun(reason=reason):
                durable = self.durable
                trained = durable.num_trained  # 0 before the first publication: a run may be stopped by then.
                self.require(
                    trained == self.rules.num_batches or bool(durable.run.stop_reason),
                    "G2 exactly once",
                    lambda: f"the run ends ({reason}) with {trained} of {self.rules.num_batches} batches trained",
                )
            case Refused(fatal=True, reason=reason):
                if REPLACED not in reason or self.sessions.get(peer) not in self.superseded:
                    self.report(Violation("no peer is refused for good", f"{peer.decode()}: {reason}"))
            case _:
                pass
        self._answer(peer, message)

    def _acknowledged(self, session: str, next_seq: int) -> None:
        """Every acknowledged message has had its effect on disk."""
        missing = set(range(next_seq)) - self.heard[session]
        self.require(
            not missing,
            "G1 nothing acknowledged is lost",
            lambda: f"{session}'s messages below {next_seq} are acknowledged, but {sorted(missing)} never came",
        )
        pending = self.unacknowledged[session]
        for seq in [seq for seq in pending if seq < next_seq]:
            for message in pending.pop(seq):
                self.require(
                    self._is_durable(session, message),
                    "G1 nothing acknowledged is lost",
                    lambda: f"{session}'s message {seq} is acknowledged but not on disk: {message}",
                )

    def _is_durable(self, session: str, message: AnyMessage) -> bool:
        durable = self.durable
        match message:
            case Chunk():
                return (
                    not self._has_lease(session, message.trajectory_id, message.epoch)
                    or durable.num_tokens(message.trajectory_id) >= message.offset + message.num_tokens
                )
            case Journal():
                return (
                    not self._has_lease(session, message.trajectory_id, message.epoch)
                    or len(durable.journals.get(message.trajectory_id, ())) > message.place
                )
            case Finish() | Graded() | Release():
                return not self._has_lease(session, message.trajectory_id, message.epoch)
            case Published():
                return message.policy_version in durable.versions
            case Trained():
                return not message.policy_version or any(
                    (row.index, row.policy_version) == (message.index, message.policy_version) for row in durable.trained
                )
            case BatchFailed(raised=raised):
                if raised:
                    self.failed_at[message.index].add(session)
                return True
            case Checkpointed():
                return durable.next_batch_checkpointed >= message.next_batch
            case _:
                return True

    def _has_lease(self, session: str, trajectory_id: int, epoch: int) -> bool:
        """Whether, on disk, the session still has the lease."""
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

    def _given_to_grade(self, grade: Grade, arrays: Mapping[str, Array]) -> None:
        """All episodes have ended on disk, and these are their last answers."""
        members = sorted(self.members(grade.group_id), key=lambda row: row.trajectory_id)
        row = self.durable.trajectories[grade.trajectory_id]
        ended = [member for member in members if member.finish_reason is not None]
        answers = [self.last_answer(member) for member in ended]
        rewards = [sum(self.alone[member.trajectory_id].turn_rewards) for member in ended]
        alone = list(zip(map(len, answers), rewards, strict=True))
        self.require(
            row.epoch >= grade.epoch
            and len(answers) == self.rules.group_size
            and arrays["token_ids"].tolist() == [token for answer in answers for token in answer]
            and [(each.num_tokens, each.reward) for each in grade.members] == alone,
            COMPARED,
            lambda: f"group {grade.group_id} is to be graded as {grade}, on disk is {members}",
        )

    def _journal_leased(self, lease: Lease, arrays: Mapping[str, Array]) -> None:
        self.happened["journal resumed"] += bool(lease.num_entries)
        journal = self.durable.journals.get(lease.trajectory_id, [])
        _, num_entries = self.leased.setdefault(
            (lease.trajectory_id, lease.epoch), (lease.num_tokens, len(journal))
        )  # What it is given twice, it is given as the first time.
        self.require(
            arrays["journal"].tobytes() == b"".join(journal[:num_entries]),
            "G1 nothing acknowledged is lost",
            lambda: (
                f"trajectory {lease.trajectory_id} is resumed with {lease.num_entries} entries of its journal, and "
                f"{num_entries} are on disk"
            ),
        )

    def _delivered(self, batch: Batch, arrays: Mapping[str, Array]) -> None:
        row = self.durable.batches.get(batch.index)
        self.require(
            row is not None, "G2 said only when durable", lambda: f"batch {batch.index} is delivered before it is durable"
        )
        content = (batch.policy_version, content_of(batch, arrays))
        if batch.index in self.contents:
            self.happened["batch delivered again"] += 1
            self.require(
                self.contents[batch.index] == content,
                "G2 a batch is delivered again as it was",
                lambda: f"batch {batch.index} is delivered with other content",
            )
        self.contents[batch.index] = content

    def _part_delivered(self, part: BatchPart, arrays: Mapping[str, Array]) -> None:
        self.require(
            part.index in self.durable.batches,
            "G2 said only when durable",
            lambda: f"part {part.part} of batch {part.index} is delivered before the batch is durable",
        )
        content = content_of(part, arrays)
        self.happened["part delivered again"] += (part.index, part.part) in self.parts
        self.require(
            self.parts.setdefault((part.index, part.part), content) == content,
            "G2 a batch is delivered again as it was",
            lambda: f"part {part.part} of batch {part.index} is delivered with other content",
        )

    def _may_be_trained(self, index: int, session: str) -> None:
        self.require(
            index not in self.durable.quarantined,
            "poison: a batch that was quarantined is not trained",
            lambda: f"batch {index} is delivered to {session}, and was quarantined",
        )
        self.require(
            len(self.failed_at[index]) < REPORTED_MOST,
            "poison: a batch that ended two learners is quarantined",
            lambda: f"batch {index} is delivered to {session}, after {self.failed_at[index]} could not train it",
        )
        self.delivered_to[index].add(session)


def _parts_of(message: AnyMessage, arrays: Mapping[str, Array]) -> list[AnyMessage]:
    """What has an effect of its own: each of many chunks."""
    if not isinstance(message, Chunks):
        return [message]
    chunks = Gathered(arrays)
    return [chunks.chunk(place)[0] for place in range(len(chunks))]
