"""What the files beside a ledger know, and the ledger does not: what was acknowledged and is lost.

Everything is read before a writer opens the ledger, because SQLite writes over a log that it cannot read.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gspo_services.broker.metrics_file import METRICS_FILE, last_line
from gspo_services.broker.store.commits import Commit
from gspo_services.broker.store.mark import MARK_FILE, Mark, read_mark
from gspo_services.shared.runtime.errors import DiskDamageError
from gspo_services.shared.settings import SETTINGS_FILE

WAL_SUFFIX: Final = "-wal"
WAL_HEADER: Final = struct.Struct(">8I")
WAL_MAGIC: Final = (0x377F0682, 0x377F0683)
WORD: Final = 0xFFFFFFFF


class StoreDamaged(DiskDamageError):
    """Something that was acknowledged is missing. The text says what is lost, and the way on."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What the files beside a ledger say about it. Read it before the ledger: a running broker commits first."""

    directory: Path
    mark: Mark | None
    last_line: int
    """Lines of metrics.jsonl."""
    checkpoint: tuple[str, int] | None
    """The checkpoint of most batches: its name and their number."""
    has_settings: bool
    log: str
    """What is wrong with the write-ahead log; empty for nothing that can be seen from outside."""


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What the ledger itself says."""

    run_id: str
    newest: Commit
    marked: Commit | None
    """Its commit of the number that the mark has; None when that is too long ago, or never was."""


@dataclass(frozen=True, kw_only=True)
class Loss:
    """What is missing. ``reasons``: clauses of one sentence."""

    reasons: list[str] = field(default_factory=list)
    commits: int = 0
    chunks: int = 0
    tokens: int = 0
    batches: int = 0
    lines: int = 0

    def __bool__(self) -> bool:
        return bool(self.reasons)

    def __str__(self) -> str:
        return "; ".join(self.reasons)


def read_evidence(directory: Path, ledger: Path) -> Evidence:
    """Read the files beside ``ledger``. Raises: OSError."""
    return Evidence(
        directory=directory,
        mark=read_mark(directory / MARK_FILE),
        last_line=last_line(directory / METRICS_FILE),
        checkpoint=_newest_checkpoint(directory),
        has_settings=(directory / SETTINGS_FILE).is_file(),
        log=_log_damage(ledger.with_name(ledger.name + WAL_SUFFIX)),
    )


def loss_without_ledger(evidence: Evidence) -> Loss:
    """What is lost when there is no ledger; nothing in a directory without a run."""
    mark, commit = evidence.mark, None if evidence.mark is None else evidence.mark.commit
    reasons = []
    if commit is not None and commit.number:
        reasons.append(f"{MARK_FILE} knows of {_held(commit)}")
    if evidence.last_line:
        reasons.append(f"{METRICS_FILE} has {evidence.last_line} lines")
    if evidence.checkpoint is not None:
        reasons.append("checkpoint {} covers {} batches".format(*evidence.checkpoint))
    if evidence.has_settings and mark is None and not reasons:
        reasons.append(f"{SETTINGS_FILE} is there, which is written after the ledger")
    if commit is None:
        return Loss(reasons=reasons, lines=evidence.last_line)
    return Loss(
        reasons=reasons,
        commits=commit.number,
        chunks=commit.chunks,
        tokens=commit.tokens,
        batches=commit.batches,
        lines=max(evidence.last_line, commit.lines),
    )


def loss_of(evidence: Evidence, recorded: Recorded) -> Loss:
    """Compare. Nothing is lost when the ledger holds all that the files beside it know of."""
    mark, newest = evidence.mark, recorded.newest
    reasons = list(_against_mark(mark, recorded))
    lines = max(0, evidence.last_line - newest.lines)
    if lines:
        reasons.append(f"{METRICS_FILE} has {evidence.last_line} lines, the ledger {newest.lines}")
    batches = 0
    if evidence.checkpoint is not None and evidence.checkpoint[1] > newest.batches:
        name, covered = evidence.checkpoint
        batches = covered - newest.batches
        reasons.append(f"checkpoint {name} covers {covered} batches, the ledger has {newest.batches}")
    if mark is None and newest.number:
        why = "so nobody can say whether its last commits are all there"
        reasons.append(f"{MARK_FILE} is not there, or cannot be read, {why}")
    if reasons and evidence.log:
        reasons.append(evidence.log)
    if mark is None or mark.commit.number <= newest.number:
        return Loss(reasons=reasons, lines=lines, batches=batches)
    return Loss(
        reasons=reasons,
        commits=mark.commit.number - newest.number,
        chunks=mark.commit.chunks - newest.chunks,
        tokens=mark.commit.tokens - newest.tokens,
        batches=max(batches, mark.commit.batches - newest.batches),
        lines=max(lines, mark.commit.lines - newest.lines),
    )


def _against_mark(mark: Mark | None, recorded: Recorded) -> Iterator[str]:
    newest = recorded.newest
    if mark is None:
        return
    number = mark.commit.number
    if mark.run_id != recorded.run_id:
        yield f"{MARK_FILE} belongs to run {mark.run_id}, the ledger to run {recorded.run_id}"
    elif number > newest.number:
        lost = [
            f"{amount:,} {what}"
            for what, amount in (
                ("commits", number - newest.number),
                ("chunks", mark.commit.chunks - newest.chunks),
                ("tokens", mark.commit.tokens - newest.tokens),
                ("batches", mark.commit.batches - newest.batches),
                (f"lines of {METRICS_FILE}", mark.commit.lines - newest.lines),
            )
            if amount
        ]
        yield f"the ledger ends at commit {newest.number}, {MARK_FILE} at commit {number}: {', '.join(lost)} are lost"
    elif recorded.marked is not None and recorded.marked.digest != mark.commit.digest:
        yield (
            f"commit {number} of the ledger is another one than that of {MARK_FILE}: the ledger is a copy that went its own "
            "way, and what the run acknowledged since is not in it"
        )


def stale_mark(mark: Mark | None, recorded: Recorded) -> str:
    """Why a mark that fits proves nothing of the ledger's last commits; empty when it does."""
    if mark is None or mark.commit.number > recorded.newest.number or recorded.marked is not None:
        return ""
    behind = recorded.newest.number - mark.commit.number
    return f"{MARK_FILE} is {behind:,} commits behind the ledger: it was put back, or its disk does not take it"


def _held(commit: Commit) -> str:
    return f"{commit.number:,} commits, {commit.chunks:,} chunks, {commit.tokens:,} tokens and {commit.batches:,} batches"


def checkpoint_position(name: str) -> int | None:
    """The number of batches that the checkpoint of this name covers; None for any other name."""
    position = name.rpartition("-")[2]
    return int(position) if position.isascii() and position.isdigit() else None


def _newest_checkpoint(directory: Path) -> tuple[str, int] | None:
    found = []
    for path in directory.glob("checkpoints/version-*-batch-*/checkpoint.json"):
        position = checkpoint_position(path.parent.name)
        if position is not None:
            found.append((position, path.parent.name))
    if not found:
        return None
    most, name = max(found)
    return name, most


def _log_damage(path: Path) -> str:
    """SQLite takes a log with a damaged header for an empty one."""
    try:
        with path.open("rb") as file:
            header = file.read(WAL_HEADER.size)
    except FileNotFoundError:
        header = b""
    if not header:
        return f"{path.name} is not there, or empty"
    if len(header) < WAL_HEADER.size:
        return f"{path.name} has no whole header"
    words = WAL_HEADER.unpack(header)
    if words[0] not in WAL_MAGIC or words[6:] != _wal_checksum(header, big=bool(words[0] & 1)):
        return f"the header of {path.name} is damaged"
    return ""


def _wal_checksum(header: bytes, *, big: bool) -> tuple[int, int]:
    """SQLite's checksum over the first 24 bytes of its log (sqlite.org/fileformat2.html#walformat)."""
    first = second = 0
    words = struct.unpack(">6I" if big else "<6I", header[:24])
    for at in range(0, len(words), 2):
        first = (first + words[at] + second) & WORD
        second = (second + words[at + 1] + first) & WORD
    return first, second
