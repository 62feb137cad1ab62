"""Committed rows are whole, in order, written by one writer, and are what the engines made."""
# ruff: noqa: B023 - the text of a violation is made at once

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from gspo_services.broker.ledger import MOST_BEHIND
from gspo_services.broker.ledger.quarantine import REPORTED_MOST, SILENT_MOST
from gspo_services.broker.rows import (
    ArchivedRow,
    BatchRow,
    CheckpointedRow,
    EvaluationRow,
    GroupRow,
    JournalRow,
    QuarantinedRow,
    Row,
    RunRow,
    TrainedRow,
    TrajectoryRow,
    VersionRow,
)
from gspo_services.broker.store.payload import StoredChunk
from gspo_services.broker.store.reader import Reader, StoreCorrupt
from gspo_services.broker.store.store import RowChanges
from tests.simulation.audit.agents import AgentAudit
from tests.simulation.audit.books import SAME_CONTEXT, Violation, header_of
from tests.simulation.audit.sampling import SamplingAudit
from tests.simulation.audit.sequences import Placed
from tests.simulation.episodes import version_in

QUARANTINE = {("batched", "quarantined"), ("quarantined", "requeued"), ("requeued", "complete"), ("requeued", "resampled")}


class DiskAudit(SamplingAudit, AgentAudit):
    """Checks every transaction."""

    def committed(self, changes: RowChanges) -> None:
        """A transaction is durable."""
        before = self.num_filtered_out
        # Groups first: the checks of a trajectory's lease need its group.
        for row in changes.rows:
            if isinstance(row, GroupRow):
                self._group(row)
        for chunk in changes.chunks:
            self._chunk(chunk, changes.rows)
        for row in changes.rows:
            self._row(row)
        changed = [
            each.trajectory_id for each in (*changes.rows, *changes.chunks) if isinstance(each, TrajectoryRow | StoredChunk)
        ]
        for trajectory_id in dict.fromkeys(changed):
            self._counts(self.durable.trajectories[trajectory_id])
        self.sifted(changes.rows, self.num_filtered_out - before)
        self.passes("committed")

    def archived(self, reader: Reader, changes: RowChanges) -> None:
        """Tokens have left the ledger: what is read now is what was acknowledged."""
        for row in changes.rows:
            if not isinstance(row, ArchivedRow):
                continue
            self.happened["group archived"] += 1
            for member in self.members(row.group_id):
                self.durable.journals.pop(member.trajectory_id, None)
            group = self.durable.groups[row.group_id]
            self.require(
                group.status in ("dropped", "evaluated", "filtered", "resampled")
                or (group.status == "batched" and (group.batch or 0) < self.durable.next_batch_checkpointed),
                "retention: only what is over leaves the ledger",
                lambda: f"{group} is archived; a checkpoint covers {self.durable.next_batch_checkpointed} batches",
            )
            for member in self.members(row.group_id):
                try:
                    found: list[StoredChunk] = reader.chunks(member.trajectory_id)
                except StoreCorrupt as error:
                    self.report(Violation("G1 nothing acknowledged is lost", f"group {row.group_id} was archived: {error}"))
                    return
                self.require(
                    found == self.durable.chunks.get(member.trajectory_id, []),
                    "G1 nothing acknowledged is lost",
                    lambda: f"trajectory {member.trajectory_id} was archived, and reads as {len(found)} other chunks",
                )
        self.passes("archived")

    @property
    def _may_come_to_other_weights(self) -> bool:
        """A learner trains what was trained before: not alike, or other groups after a loss."""
        return self.num_learner_lives > 1 and (not self.rules.is_deterministic or self.happened["loss accepted"] > 0)

    def _row(self, row: Row) -> None:
        durable = self.durable
        match row:
            case TrajectoryRow():
                self._trajectory(row)
            case RunRow():
                self.durable.run = row
                if row.learner_batch is not None:
                    # It may get it: the broker dies before it sends it, and the learner before it asks again.
                    self.delivered_to[row.learner_batch].add(row.learner_session)
            case VersionRow():
                newest = durable.versions.get(durable.newest_version)
                again = newest is not None and row == replace(newest, endpoint=row.endpoint)
                self.require(
                    again or row.policy_version > durable.newest_version,
                    "versions grow",
                    lambda: f"version {row.policy_version} is published after {durable.newest_version}",
                )
                durable.versions[row.policy_version] = row
            case JournalRow():
                journal = durable.journals.setdefault(row.trajectory_id, [])
                self.require(
                    row.place == len(journal),
                    "G1 nothing acknowledged is lost",
                    lambda: (
                        f"trajectory {row.trajectory_id}: entry {row.place} of the journal, but {len(journal)} are stored"
                    ),
                )
                journal.append(row.entry)
            case BatchRow():
                self._batch(row)
            case QuarantinedRow():
                self._quarantined(row)
            case TrainedRow():
                durable.trained.append(row)
                if row.how == "trained":
                    self.delivered_to.pop(row.index, None)
                    self.failed_at.pop(row.index, None)
                self.happened["batch trained again"] += int(
                    sum(1 for other in durable.trained if other.index == row.index) > 1
                )
            case CheckpointedRow():
                durable.next_batch_checkpointed = row.next_batch
            case EvaluationRow():
                self.happened["evaluation done"] += int(row.status == "done")
            case _:
                pass

    def _group(self, row: GroupRow) -> None:
        former = self.durable.groups.get(row.group_id)
        if former is None and row.split == "train":
            firsts = [group for group in self.durable.groups.values() if group.split == "train" and group.replaces is None]
            replaced = None if row.replaces is None else self.durable.groups[row.replaces]
            expected = len(firsts) if replaced is None else replaced.prompt
            self.happened["prompt sampled again"] += int(replaced is not None)
            self.require(
                row.prompt == expected
                and (replaced is None or replaced.task_index == row.task_index)
                and (replaced is None or replaced.status == "resampled"),
                "G2 no prompt is skipped",
                lambda: f"group {row.group_id} has prompt {row.prompt} (task {row.task_index}), {expected} is next",
            )
        if former is not None:
            self.require(
                former.status in ("open", "complete") or (former.status, row.status) in QUARANTINE,
                "G2 exactly once",
                lambda: f"group {row.group_id} was already {former.status} and becomes {row.status}",
            )
            if (former.status, row.status) == ("requeued", "complete"):
                self.requeued.add(row.group_id)
                self.happened["group taken back"] += 1
        if row.status == "dropped":
            self.happened[f"group dropped: {row.drop_reason}"] += 1
            self.require(
                row.drop_reason == "failed" or self._may_come_to_other_weights,
                "G3 nothing is dropped as stale while versions follow each other",
                lambda: f"group {row.group_id} is dropped as stale, and no learner came to other weights",
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
        if row.finish_reason is not None and (former is None or former.finish_reason is None):
            self.alone[row.trajectory_id] = row
            if self.rules.agents:
                self.agent_finished(row)
        if row.finish_reason is not None and row.status == "leased":
            return  # It is leased to be compared: no engine adds to it.
        granted = row.epoch - (0 if former is None else former.epoch)
        if not granted:
            return
        durable.granted[row.trajectory_id] = row.lease_version
        is_hostile = row.holder_peer.startswith("hostile")  # It says what it likes about its engine, and has none.
        self.require(
            is_hostile or row.lease_version == 0 or row.lease_version in self.served[row.holder_session],
            "G4 only engines with a verified version get leases",
            lambda: (
                f"{row.holder_session} got trajectory {row.trajectory_id} at version {row.lease_version}; its engine "
                f"has loaded {self.served[row.holder_session]}"
            ),
        )
        group = durable.groups[row.group_id]
        if row.status == "leased" and group.split == "train":
            oldest = max(1, durable.next_version - self.rules.max_lag)
            self.require(
                row.lease_version >= oldest,
                "G4 only engines with a verified version get leases",
                lambda: (
                    f"trajectory {row.trajectory_id} is leased at version {row.lease_version}; the oldest that can be "
                    f"trained is {oldest}"
                ),
            )

    def _counts(self, row: TrajectoryRow) -> None:
        stored = self.durable.num_tokens(row.trajectory_id)
        behind = [chunk for chunk in self.durable.chunks.get(row.trajectory_id, ()) if chunk.start >= row.num_tokens]
        self.happened["row behind its chunks"] += bool(behind)
        self.require(
            stored == row.num_tokens + sum(chunk.num_tokens for chunk in behind)
            and len(behind) < (MOST_BEHIND if row.status == "leased" else 1)
            and all(chunk.epoch == row.epoch for chunk in behind),
            "G1 nothing acknowledged is lost",
            lambda: f"trajectory {row.trajectory_id} has {row.num_tokens} tokens in its row and {stored} in its chunks",
        )

    def _chunk(self, chunk: StoredChunk, rows: Sequence[Row]) -> None:
        stored = self.durable.num_tokens(chunk.trajectory_id)
        self.require(
            chunk.start == stored,
            "G1 nothing acknowledged is lost",
            lambda: f"trajectory {chunk.trajectory_id}: a chunk begins at {chunk.start}, but {stored} tokens are stored",
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
            lambda: f"trajectory {chunk.trajectory_id}: epoch {chunk.epoch} writes, but its lease is {row}",
        )
        segments, runs = header_of(chunk)
        granted = self.durable.granted.get(chunk.trajectory_id, 0)
        oldest = min((run.version for run in runs if run.version != -1), default=granted)
        self.require(
            oldest >= granted,
            "G4 an engine's versions do not go back",
            lambda: f"trajectory {chunk.trajectory_id}: version {oldest} under a lease of an engine at version {granted}",
        )
        placed = self.log_of(chunk.trajectory_id).append(segments, np.frombuffer(chunk.token_ids, "<i4").tolist())
        former.append(chunk)
        self.happened["trajectory resumed"] += int(len(former) > 1 and former[-2].epoch < chunk.epoch)
        self._tokens(
            chunk,
            placed,
            np.frombuffer(chunk.logprobs, "<f4").tolist(),
            [run.version for run in runs for _ in range(run.num_tokens)],
        )

    def _tokens(
        self, chunk: StoredChunk, placed: Sequence[Placed], logprobs: Sequence[float], versions: Sequence[int]
    ) -> None:
        """Each action token is what this epoch's engine made after the tokens before it, with the version that made it."""
        trajectory_id, epoch = chunk.trajectory_id, chunk.epoch
        for place, (token, logprob, version) in enumerate(zip(placed, logprobs, versions, strict=True), start=chunk.start):
            if token.kind == "observation":
                ok = version == -1 and logprob == 0.0
            else:
                ok = version == version_in(logprob)
                self.require(
                    not ok or self.was_made(trajectory_id, token.context, token.token, logprob, epoch),
                    SAME_CONTEXT,
                    lambda: (
                        f"trajectory {trajectory_id}, epoch {epoch}, token {place}: action {token.token}, log-prob "
                        f"{logprob}, stands in sequence {token.sequence} where the engine made "
                        f"{self.made[trajectory_id].get(token.context, 'nothing')}"
                    ),
                )
            self.require(
                ok,
                "G4 every token carries the version that made it",
                lambda: (
                    f"trajectory {trajectory_id}, epoch {epoch}, token {place}: {token.kind} {token.token}, log-prob "
                    f"{logprob}, version {version}"
                ),
            )

    def _quarantined(self, row: QuarantinedRow) -> None:
        self.require(bool(row.reason), "poison: what is quarantined has a reason", lambda: f"batch {row.index} has none")
        poison = self.poison.get(row.index)
        least = {"unreadable": 1, "raises": REPORTED_MOST}.get(poison or "", SILENT_MOST)
        learners = self.delivered_to[row.index]
        self.require(
            len(learners) >= least,
            "poison: a healthy batch is not quarantined",
            lambda: f"batch {row.index} ({poison or 'healthy'}) is quarantined after {sorted(learners)}: {row.reason}",
        )
        self.happened[f"quarantined: {poison or 'healthy'}"] += 1
        self.durable.quarantined[row.index] = row

    def _batch(self, row: BatchRow) -> None:
        durable = self.durable
        self.require(
            row.index == len(durable.batches),
            "G2 exactly once",
            lambda: f"batch {row.index} is assembled after {len(durable.batches)} batches",
        )
        self.require(
            row.policy_version == durable.next_version <= durable.newest_version + 1,
            "G3 a batch is assembled for the learner's version",
            lambda: (
                f"batch {row.index} is assembled for version {row.policy_version}; {durable.newest_version} is announced, "
                f"and the learner has {durable.next_version}"
            ),
        )
        self.happened["batch assembled before its version was announced"] += int(row.policy_version > durable.newest_version)
        batched = {
            group_id
            for batch in durable.batches.values()
            for group_id in batch.group_ids
            if batch.index not in durable.quarantined
        }
        for group_id in row.group_ids:
            self.require(
                group_id not in batched,
                "G2 exactly once",
                lambda: f"group {group_id} is in two batches",
            )
            members = self.members(group_id)
            self.require(
                len(members) == self.rules.group_size and all(member.status == "finished" for member in members),
                "G2 exactly once",
                lambda: f"group {group_id} is in batch {row.index} unfinished: {members}",
            )
        durable.batches[row.index] = row
