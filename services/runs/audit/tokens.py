"""Checks every trajectory against its chunks: one pass over both tables in parallel, in the order of their indices.

Chunks of archived groups come from their file.
"""

import json
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from gspo_protocol.messages import Segment, VersionRun
from gspo_services.broker.rows import NO_TURN, ArchivedRow
from gspo_services.broker.store import chunk_checksum
from gspo_services.runs.audit.archives import ArchiveAudit
from gspo_services.runs.audit.findings import Findings, Rules

BYTES_PER_TOKEN: Final = 4
TRAJECTORIES: Final = """
SELECT t.trajectory_id, t.group_id, t.status, t.epoch, t.num_tokens, t.num_action_tokens, t.version_sum, t.min_version,
       t.sequences, t.num_entries, t.journal_bytes, coalesce(j.entries, 0), coalesce(j.bytes, 0),
       t.finish_reason, g.group_id IS NOT NULL, g.status, g.batch, a.archive, a.place
FROM trajectories t LEFT JOIN groups g ON g.group_id = t.group_id LEFT JOIN archived a ON a.group_id = t.group_id
LEFT JOIN (SELECT trajectory_id, count(*) entries, sum(length(entry)) bytes FROM journal GROUP BY trajectory_id) j
ON j.trajectory_id = t.trajectory_id
ORDER BY t.trajectory_id
"""
CHUNKS: Final = """
SELECT trajectory_id, start, epoch, num_tokens, header, token_ids, logprobs, checksum
FROM chunks ORDER BY trajectory_id, start
"""


class _Runs(msgspec.Struct, frozen=True, array_like=True):
    """The beginning of a chunk's header: its runs, without the environment's state."""

    segments: list[Segment]
    version_runs: list[VersionRun]


@dataclass
class _Seen:
    """Totals over the chunks of one trajectory."""

    num_tokens: int = 0
    num_actions: int = 0
    version_sum: int = 0
    oldest: int = 0
    newest: int = 0
    epoch: int = 0
    epochs: int = 0
    sequences: dict[int, list[int]] = field(default_factory=dict)
    """Each one's tokens, and its turn under way."""
    row_tokens: int | None = None
    """Where the row of a leased trajectory ends: the row may be behind its chunks..."""
    at_row: list[Any] | None = None
    """...and the totals of the chunks up to there, if more chunks follow."""

    @property
    def totals(self) -> list[Any]:
        """Return the totals in the form that a row stores."""
        return [self.num_tokens, self.num_actions, self.version_sum, self.oldest, self.states]

    @property
    def states(self) -> str:
        """Return the sequences' states in the form that a row stores."""
        return json.dumps(list(self.sequences.values()) if len(self.sequences) > 1 else [])


@dataclass(frozen=True, kw_only=True)
class TokenCounts:
    num_chunks: int
    num_resumed: int


class TokenAudit:
    """Checks all trajectories. ``batch_versions``: the version each batch was assembled for; ``versions``: all published."""

    def __init__(self, findings: Findings, rules: Rules, batch_versions: dict[int, int], versions: set[int]) -> None:
        self._findings = findings
        self._rules = rules
        self._batch_versions = batch_versions
        self._versions = versions
        self._decoder = msgspec.msgpack.Decoder(_Runs)
        self._num_chunks = 0
        self._num_resumed = 0

    def run(self, connection: sqlite3.Connection, archives: ArchiveAudit) -> TokenCounts:
        """Check all trajectories. Raises: sqlite3.DatabaseError when the file cannot be read completely."""
        chunks = iter(connection.execute(CHUNKS))
        chunk = next(chunks, None)
        for *trajectory, archive, place in connection.execute(TRAJECTORIES):
            trajectory_id, group_id = trajectory[:2]
            while chunk is not None and chunk[0] < trajectory_id:
                chunk = self._orphan(chunk, chunks)
            seen = _Seen(row_tokens=_may_be_behind(trajectory))
            if archive is not None:
                for archived in archives.chunks(ArchivedRow(group_id=group_id, archive=archive, place=place), trajectory_id):
                    self._chunk(archived, seen)
            while chunk is not None and chunk[0] == trajectory_id:
                self._chunk(chunk, seen)
                chunk = next(chunks, None)
            if archive not in archives.unreadable:
                self._trajectory(trajectory, seen, is_archived=archive is not None)
        while chunk is not None:
            chunk = self._orphan(chunk, chunks)
        return TokenCounts(num_chunks=self._num_chunks, num_resumed=self._num_resumed)

    def _orphan(self, chunk: tuple[Any, ...], chunks: Iterator[tuple[Any, ...]]) -> tuple[Any, ...] | None:
        self._findings.add(
            "chunk of no trajectory", f"a chunk at {chunk[1]} belongs to trajectory {chunk[0]}, which does not exist"
        )
        return next(chunks, None)

    def _chunk(self, chunk: tuple[Any, ...], seen: _Seen) -> None:
        trajectory_id, start, epoch, num_tokens, header, token_ids, logprobs, checksum = chunk
        where = f"trajectory {trajectory_id}: the chunk at {start}"
        self._num_chunks += 1
        if start == seen.row_tokens:
            seen.at_row = seen.totals
        if start != seen.num_tokens:
            name = "gap between chunks" if start > seen.num_tokens else "chunks overlap"
            self._findings.add(name, f"{where} follows {seen.num_tokens} tokens")
        seen.num_tokens = max(seen.num_tokens, start + num_tokens)
        if epoch < seen.epoch:
            self._findings.add("epoch went back", f"{where} has epoch {epoch}, but the one before has {seen.epoch}")
        seen.epochs += epoch != seen.epoch
        seen.epoch = epoch
        for name, data in (("token ids", token_ids), ("log-probs", logprobs)):
            if len(data) != BYTES_PER_TOKEN * num_tokens:
                self._findings.add(
                    "chunk of another length", f"{where} has {len(data)} bytes of {name} for {num_tokens} tokens"
                )
        if chunk_checksum((trajectory_id, start, epoch, num_tokens), header, token_ids, logprobs) != checksum:
            self._findings.add("chunk was changed", f"{where} does not have the checksum that was stored with it")
        try:
            runs = self._decoder.decode(header)
        except msgspec.DecodeError as error:
            self._findings.add("chunk was changed", f"{where} has a header that cannot be read: {error}")
            return
        self._count(runs, num_tokens, where, seen)

    def _count(self, runs: _Runs, num_tokens: int, where: str, seen: _Seen) -> None:
        covered = sum(run.num_tokens for run in runs.version_runs)
        in_segments = sum(segment.num_tokens for segment in runs.segments)
        if covered != num_tokens or in_segments != num_tokens:
            text = f"{where} has {num_tokens} tokens, but its segments {in_segments} and its version runs {covered}"
            self._findings.add("runs do not cover a chunk", text)
        for segment in runs.segments:
            num_before, _ = seen.sequences.get(segment.sequence, (0, NO_TURN))
            turn = segment.turn if segment.kind == "action" else NO_TURN
            seen.sequences[segment.sequence] = [num_before + segment.num_tokens, turn]
        actions = sum(segment.num_tokens for segment in runs.segments if segment.kind == "action")
        versioned = sum(run.num_tokens for run in runs.version_runs if run.version > 0)
        if actions != versioned:
            text = f"{where} has {actions} action tokens, but versions for {versioned}"
            self._findings.add("action token without a version", text)
        seen.num_actions += actions
        for run in runs.version_runs:
            if run.version <= 0:
                continue
            seen.version_sum += run.version * run.num_tokens
            seen.oldest = min(seen.oldest or run.version, run.version)
            seen.newest = max(seen.newest, run.version)
            if run.version not in self._versions:
                text = f"{where} has {run.num_tokens} tokens of version {run.version}"
                self._findings.add("token of a version that was never published", text)

    def _trajectory(self, row: list[Any], seen: _Seen, *, is_archived: bool) -> None:
        trajectory_id, group_id, status, epoch, *counts, finish_reason, group_exists, group_status, batch = row
        *counts, num_entries, journal_bytes, entries_there, bytes_there = counts
        where = f"trajectory {trajectory_id}"
        found = seen.totals if seen.at_row is None else seen.at_row
        names = ("tokens", "action tokens", "version sum", "oldest version", "sequences")
        for name, in_row, in_chunks in zip(names, counts, found, strict=True):
            if in_row != in_chunks:
                self._findings.add(
                    "row and chunks differ", f"{where}: {name} {in_row} in its row, {in_chunks} in its chunks"
                )
        if not is_archived and (num_entries, journal_bytes) != (entries_there, bytes_there):
            text = (
                f"{where}: {num_entries} entries of {journal_bytes} bytes in its row, {entries_there} of {bytes_there} there"
            )
            self._findings.add("row and journal differ", text)
        if seen.epoch > epoch:
            self._findings.add("epoch went back", f"{where} has a chunk of epoch {seen.epoch}, but its own is {epoch}")
        if seen.at_row is not None and seen.epoch < epoch:
            self._findings.add(
                "row and chunks differ", f"{where} has chunks of epoch {seen.epoch} after its row, whose own is {epoch}"
            )
        self._num_resumed += seen.epochs > 1
        if not group_exists:
            self._findings.add("trajectory of no group", f"{where} belongs to group {group_id}, which does not exist")
        has_end = finish_reason is not None
        may_await_grade = self._rules.grades_groups is not False and has_end and group_status in ("open", "dropped")
        if (status == "finished") != has_end and not may_await_grade:
            self._findings.add("trajectory without an end", f"{where} is {status}, but its finish reason is {finish_reason}")
        if group_status == "batched":
            if status != "finished":
                self._findings.add("unfinished trajectory in a batch", f"{where} is {status} and in batch {batch}")
            self._lag(where, batch, seen)

    def _lag(self, where: str, batch: int | None, seen: _Seen) -> None:
        version = self._batch_versions.get(-1 if batch is None else batch)
        if version is None:
            return  # Already reported for the group.
        if seen.newest > version:
            text = f"{where} has tokens of version {seen.newest}, but its batch {batch} was assembled at {version}"
            self._findings.add("token newer than its batch", text)
        if self._rules.max_lag is not None and version - seen.oldest > self._rules.max_lag:
            text = (
                f"{where} has tokens of version {seen.oldest}, its batch {batch} was assembled at {version}: "
                f"{version - seen.oldest} versions, {self._rules.max_lag} allowed"
            )
            self._findings.add("token too old", text)


def _may_be_behind(trajectory: Sequence[Any]) -> int | None:
    """Return the tokens in the row of a leased trajectory; None for any other, whose row covers all of its chunks."""
    _, _, status, _, num_tokens, *_, group_status, _ = trajectory
    return int(num_tokens) if status == "leased" and group_status == "open" else None
