"""``gspo requeue RUN_DIR [BATCH ...]``: list what was quarantined, or requeue it."""

import asyncio
import sqlite3
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from gspo_services.broker.ledger import Quarantine, requeued_line
from gspo_services.broker.store import (
    LEDGER_FILE,
    NoLedger,
    RowChanges,
    Store,
    StoreCorrupt,
    StoreMismatch,
    StoreUnavailable,
    reading,
    refusing_damage,
)
from gspo_services.cli.operator import NoAnswer, TurnedAway, operator
from gspo_services.shared.runtime.logs import configure_logging
from gspo_services.shared.runtime.plain_text import one_line
from gspo_services.shared.settings import Settings, override_settings, read_run_settings, run_fingerprint

ANSWER_S: Final = 15.0
LOOK_S: Final = 0.2
ALL: Final = "all"
BY: Final = "gspo requeue"
QUARANTINED: Final = """
SELECT a.batch, a.policy_version, a.reason, total(g.status = 'quarantined'), total(g.status = 'requeued'),
       (SELECT json_extract(line, '$.time') FROM metrics_lines
        WHERE json_extract(line, '$.event') = 'quarantined' AND json_extract(line, '$.batch') = a.batch)
FROM quarantined a LEFT JOIN groups g ON g.batch = a.batch GROUP BY a.batch ORDER BY a.batch
"""


@dataclass(frozen=True, kw_only=True)
class QuarantinedBatch:
    """A batch that was quarantined."""

    batch: int
    policy_version: int
    """The newest version then."""
    reason: str
    waiting: int
    """Groups that are still quarantined."""
    requeued: int
    """Groups that were requeued, and wait for room."""
    at: float | None
    """Seconds since 1970."""


def read_quarantine(directory: Path) -> list[QuarantinedBatch]:
    """The batches of a run that were quarantined, by index.

    Raises: NoLedger; StoreCorrupt when the ledger is damaged; sqlite3.OperationalError when it cannot be read now.
    """
    with refusing_damage(directory / LEDGER_FILE), reading(directory) as connection:
        return [
            QuarantinedBatch(
                batch=batch, policy_version=version, reason=why, waiting=int(waiting), requeued=int(requeued), at=at
            )
            for batch, version, why, waiting, requeued, at in connection.execute(QUARANTINED)
        ]


def requeue_command(directory: Path, batches: Sequence[str], *, only_list: bool) -> int:
    """List, or requeue the groups of ``batches`` ("all": of every one). Returns 0, or 1 when that could not be done.

    Raises: ConfigurationError when there is no such run, ValueError for a batch that is not quarantined.
    """
    configure_logging("requeue", usual_level="warning")
    settings = override_settings(read_run_settings(directory), [f"run.directory={directory}"])
    try:
        found = read_quarantine(directory)
        if only_list or not batches:
            _show(directory, found)
            return 0
        wanted = _wanted(batches, found)
        if not wanted:
            print("no batch is quarantined")
            return 0
        text = _requeue(settings, directory, wanted)
    except (NoLedger, StoreCorrupt, StoreUnavailable, StoreMismatch, NoAnswer, sqlite3.OperationalError) as error:
        print(one_line(f"gspo requeue: {error}"), file=sys.stderr)
        return 1
    print(one_line(text))
    return 0


def _wanted(batches: Sequence[str], found: Sequence[QuarantinedBatch]) -> list[int]:
    """Raises: ValueError."""
    waiting = [each.batch for each in found if each.waiting]
    if list(batches) == [ALL]:
        return waiting
    known = ", ".join(map(str, waiting)) or "none"
    for word in batches:
        if not word.isdecimal() or int(word) not in waiting:
            raise ValueError(f"{word} is not a quarantined batch; quarantined are: {known}")
    return sorted({int(word) for word in batches})


def _requeue(settings: Settings, directory: Path, wanted: list[int]) -> str:
    """Raises: NoAnswer, StoreUnavailable, StoreMismatch, NoLedger, StoreCorrupt."""
    named = ", ".join(map(str, wanted))
    try:
        asyncio.run(_ask(settings, directory, wanted))
        return (
            f"batch {named} is requeued: groups that are fresh enough are trained as they are, once there is room; the "
            "prompts of the others are sampled again"
        )
    except TurnedAway:
        raise
    except NoAnswer:
        requeue_stopped(directory, fingerprint=run_fingerprint(settings), batches=wanted)
    return f"batch {named} is requeued: no broker is running, and the next one of this run uses it"


async def _ask(settings: Settings, directory: Path, wanted: list[int]) -> None:
    async with operator(settings) as broker:
        await broker.requeue(wanted, ANSWER_S)
        # What was requeued is in the ledger.
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            if not any(each.waiting for each in read_quarantine(directory) if each.batch in wanted):
                return
            await asyncio.sleep(LOOK_S)
    raise TurnedAway(f"the broker did not requeue batch {wanted[0]} within {ANSWER_S:g} s: its log says why")


def requeue_stopped(directory: Path, *, fingerprint: str, batches: Sequence[int]) -> None:
    """Requeue batches in the ledger of a run without a broker.

    Raises: StoreUnavailable when a broker has it, StoreMismatch.
    """
    with Store(directory / LEDGER_FILE, fingerprint=fingerprint, run_id="") as store:
        contents = store.contents()
        requeued = Quarantine(contents).requeue(batches)
        version = max((row.policy_version for row in contents.versions), default=0)
        line = requeued_line(requeued, BY, version) | {"time": datetime.now(tz=UTC).timestamp(), "time_s": store.elapsed_s()}
        store.commit(RowChanges(rows=[each.group for each in requeued], lines=[line]))


def _show(directory: Path, found: Sequence[QuarantinedBatch]) -> None:
    # Reasons are long: a table would cut them into columns of a few letters.
    if not found:
        print("no batch was ever quarantined")
        return
    for each in found:
        when = "" if each.at is None else datetime.fromtimestamp(each.at, tz=UTC).strftime(", %Y-%m-%d %H:%M:%S UTC")
        groups = f"{each.waiting} groups quarantined" if each.waiting else "requeued"
        if each.requeued:
            groups += f", {each.requeued} groups wait for room"
        print(f"batch {each.batch}: {groups} (at version {each.policy_version}{when})")
        print(f"    {one_line(each.reason)}")
    if any(each.waiting for each in found):
        print(one_line(f"when the cause is gone: gspo requeue {directory} BATCH, or all"))
