"""Observes a run from outside: its broker's status, its processes' pages, and its files."""

import asyncio
import json
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from gspo_services.broker.metrics_file import METRICS_FILE
from gspo_services.broker.store import LEDGER_FILE, NoLedger, StoreCorrupt, reading, refusing_damage
from gspo_services.cli.doctor.damage import Holder, find_damage, find_holder
from gspo_services.cli.operator import NoAnswer, TurnedAway, operator
from gspo_services.cli.requeue import QuarantinedBatch, read_quarantine
from gspo_services.cli.run import FINAL_EVENTS, last_error
from gspo_services.runs.learning import ShownAnswer, outcome_of, shown_answers
from gspo_services.runs.metrics import NoMetrics, read_metrics
from gspo_services.shared.learning import LearningWatch
from gspo_services.shared.runtime.http_content import UNCOMPRESSED, content_within
from gspo_services.shared.runtime.log_files import read_end
from gspo_services.shared.settings import Settings

ANSWER_S: Final = 8.0
PAGE_S: Final = 3.0
PAGE_BYTES: Final = 4 * 1024 * 1024
TAIL_BYTES: Final = 65_536
RECENT_BATCHES: Final = 10
RECENT_LINES_S: Final = 120.0
_Content = TypeVar("_Content")


@dataclass(frozen=True, kw_only=True)
class Page:
    """What a process's HTTP endpoint answers. ``ready`` is None when nothing answers."""

    url: str
    ready: bool | None
    text: str
    """The text of /readyz, or why it could not be read."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Samples of /metrics by name, summed over their labels."""
    nobody: bool = False
    """Nothing listens there."""

    @property
    def up(self) -> bool:
        return self.ready is not None


@dataclass(frozen=True, kw_only=True)
class Log:
    """The end of a process's log."""

    event: str
    """The last event."""
    age_s: float
    error: str
    """The error that the process ended with; empty when its last line is not one."""
    warnings: dict[str, int] = field(default_factory=dict)
    """How often each warning came within RECENT_LINES_S, as far back as TAIL_BYTES of the log go."""


@dataclass(frozen=True, kw_only=True)
class LedgerState:
    """What the ledger on disk says when the broker does not answer."""

    batches: int
    trained: int
    version: int
    groups: dict[str, int]
    quarantined: tuple[QuarantinedBatch, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Observation:
    """A run as seen from outside. What could not be read is None."""

    settings: Settings
    status: dict[str, Any] | None
    """The broker's own status."""
    no_status: str
    """Why there is no status."""
    turned_away: bool
    """The broker refuses this command, or our own configuration forbids asking."""
    pages: dict[str, Page]
    """Each process's page, by name."""
    logs: dict[str, Log]
    ledger: LedgerState | None
    no_ledger: str
    batches: list[dict[str, Any]]
    """The rows of the last batches, oldest first. ``time_s`` is in seconds of the run: no clock that was set disturbs it."""
    free_bytes: dict[str, tuple[int, int]]
    """Free and total bytes of the file systems in use, by their content."""
    damage: str = ""
    """What a broker would refuse to start with; empty if nothing."""
    holder: Holder | None = None
    """The process that has the ledger open for writing."""
    learning: LearningWatch = field(default_factory=LearningWatch)
    """What metrics.jsonl says of learning."""
    outcome: str = ""
    """Whether the run has learned; empty before its first batch."""
    answers: tuple[ShownAnswer, ...] = ()
    """Some answers of the newest batch, where something keeps the run from learning."""
    unread: list[str] = field(default_factory=list)
    """Files that exist but could not be read, with the reason."""


async def observe(settings: Settings, now: datetime, *, answer_s: float = ANSWER_S) -> Observation:
    """Ask all processes and read all files. ``now`` has a time zone. The broker may take ``answer_s`` to answer."""
    status, no_status, turned_away = None, "", False
    try:
        async with operator(settings) as broker:
            status = await broker.status(answer_s)
    except NoAnswer as error:
        no_status, turned_away = str(error), isinstance(error, TurnedAway)
    directory = settings.run.directory
    ledger, no_ledger = None, ""
    try:
        ledger = read_ledger(directory)
    except (NoLedger, StoreCorrupt, sqlite3.OperationalError) as error:
        no_ledger = str(error)
    names = process_names(settings, status)
    unread: list[str] = []
    learning = _read_learning(directory)
    logs = {name: _read(unread, directory / "logs" / f"{name}.log", partial(read_log, now=now), None) for name in names}
    return Observation(
        settings=settings,
        status=status,
        no_status=no_status,
        turned_away=turned_away,
        pages=await _read_pages(settings),
        logs={name: log for name, log in logs.items() if log is not None},
        ledger=ledger,
        no_ledger=no_ledger,
        damage=_read(unread, directory, find_damage, ""),
        holder=find_holder(directory),
        batches=_read(unread, directory / METRICS_FILE, last_batches, []),
        free_bytes=free_bytes(settings),
        learning=learning,
        outcome=str(outcome_of(directory, learning)) if learning.num_batches else "",
        answers=tuple(shown_answers(directory, settings)) if learning.findings else (),
        unread=unread,
    )


def _read_learning(directory: Path) -> LearningWatch:
    try:
        return read_metrics(directory).learning
    except NoMetrics:
        return LearningWatch()  # Before the first batch; a file that cannot be read is told of by the batches' times.


def _read(unread: list[str], path: Path, read: Callable[[Path], _Content], otherwise: _Content) -> _Content:
    """Return what ``read`` finds in a file. A file that cannot be read joins ``unread``, and the rest goes on."""
    try:
        return read(path)
    except OSError as error:
        unread.append(f"{path} ({error.strerror})")
        return otherwise


def process_names(settings: Settings, status: dict[str, Any] | None) -> list[str]:
    """List the processes that the settings ask for, and rollouts that joined besides."""
    names = ["broker", "learner", *(f"rollout-{index}" for index in range(settings.rollout.num_servers))]
    joined = [] if status is None else [rollout["peer"] for rollout in status["rollouts"]]
    return [*names, *(name for name in joined if name not in names)]


def addresses(settings: Settings) -> dict[str, tuple[str, int]]:
    """Return host and port of each process's page. Port 0 in the settings means any free port, which is unknown here."""
    here = settings.security.metrics_host
    here = "127.0.0.1" if here in ("0.0.0.0", "::") else here
    found = {
        "broker": (_host(settings.broker.batch_endpoint, here), settings.broker.metrics_port),
        "learner": (
            _host(settings.learner.advertised_weights_endpoint or settings.learner.weights_endpoint, here),
            settings.learner.metrics_port,
        ),
    }
    first = settings.rollout.metrics_port
    if first:
        found |= {f"rollout-{index}": (here, first + index) for index in range(settings.rollout.num_servers)}
    return {name: address for name, address in found.items() if address[1]}


def _host(endpoint: str, here: str) -> str:
    """Return the host of ``endpoint`` as others reach it; ``here`` if it names no host, or loopback."""
    host = urlsplit(endpoint).hostname
    return here if host in (None, "*", "0.0.0.0", "::", "127.0.0.1", "localhost") else str(host)


async def _read_pages(settings: Settings) -> dict[str, Page]:
    """Read each process's page, by name."""
    found = addresses(settings)
    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=PAGE_S), auto_decompress=False, headers=UNCOMPRESSED
    ) as session:
        pages = await asyncio.gather(*(read_page(session, f"http://{host}:{port}") for host, port in found.values()))
    return dict(zip(found, pages, strict=True))


async def read_page(session: aiohttp.ClientSession, base: str) -> Page:
    """Read /readyz and /metrics of one process."""
    try:
        ready, text = await _fetch(session, f"{base}/readyz")
        _, page = await _fetch(session, f"{base}/metrics")
        metrics = metrics_of(page)
    except aiohttp.ClientConnectorError as error:
        nobody = isinstance(error.os_error, ConnectionRefusedError)
        text = f"nothing listens at {base}" if nobody else f"{base} cannot be reached: {error.os_error.strerror}"
        return Page(url=base, ready=None, text=text, nobody=nobody)
    except TimeoutError:
        return Page(url=base, ready=None, text=f"{base} has not answered for {PAGE_S:g} s")
    # Any program may listen there, even one that does not speak HTTP.
    except (OSError, ValueError, aiohttp.ClientError) as error:
        return Page(
            url=base, ready=None, text=f"{base} does not answer as a process of this run: {str(error) or repr(error):.200}"
        )
    return Page(url=base, ready=ready, text=text.strip(), metrics=metrics)


def metrics_of(page: str) -> dict[str, float]:
    """Parse a /metrics page: samples by name, summed over labels. Raises: ValueError for any other page."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            values[sample.name] = values.get(sample.name, 0.0) + float(sample.value)
    return values


async def _fetch(session: aiohttp.ClientSession, url: str) -> tuple[bool, str]:
    async with session.get(url) as answer:
        content = await content_within(answer, PAGE_BYTES)
    return answer.ok, content.decode(errors="replace")


def read_log(path: Path, now: datetime) -> Log | None:
    """Read the end of a log; None if there is no file or no event in it."""
    lines = read_end(path, TAIL_BYTES).split("\n")
    last: tuple[str, float] | None = None
    warnings: Counter[str] = Counter()
    for line in reversed(lines):
        try:
            event = json.loads(line)
            age_s = (now - datetime.fromisoformat(event["timestamp"])).total_seconds()
            name, is_warning = str(event["event"]), event.get("level") == "warning"
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue
        last = last or (name, age_s)
        # Its process may have another clock, and lines from before a clock was set are of no known age.
        if abs(age_s - min(last[1], 0.0)) > RECENT_LINES_S:
            break
        if is_warning:
            left_out = event.get("left_out")
            warnings[name] += 1 + (left_out if isinstance(left_out, int) else 0)
    if last is None:
        return None
    return Log(
        event=last[0], age_s=last[1], error=last_error(path) if last[0] in FINAL_EVENTS else "", warnings=dict(warnings)
    )


def read_ledger(directory: Path) -> LedgerState:
    """Read a run's ledger.

    Raises: NoLedger; StoreCorrupt when it is damaged; sqlite3.OperationalError when it cannot be read now.
    """
    with refusing_damage(directory / LEDGER_FILE), reading(directory) as connection:
        newest = connection.execute(
            "SELECT policy_version, trained_batches FROM versions ORDER BY policy_version DESC LIMIT 1"
        ).fetchone()
        batches = connection.execute("SELECT coalesce(max(batch) + 1, 0) FROM batches").fetchone()[0]
        groups = connection.execute("SELECT status, count(*) FROM groups WHERE split = 'train' GROUP BY status")
        version, trained = newest or (0, 0)
        counts = dict(groups.fetchall())
    return LedgerState(
        batches=batches, trained=trained, version=version, groups=counts, quarantined=tuple(read_quarantine(directory))
    )


def last_batches(path: Path) -> list[dict[str, Any]]:
    """The rows of the last batches, oldest first; empty when metrics.jsonl is not there."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().decode(errors="replace").split("\n")
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue  # the first and the last line may be cut
        if isinstance(row, dict) and row.get("event") == "batch" and isinstance(row.get("time_s"), float):
            rows.append(row)
    return rows[-RECENT_BATCHES:]


def free_bytes(settings: Settings) -> dict[str, tuple[int, int]]:
    """Return free and total bytes where the run writes, as far as it is on this host."""
    places = {
        f"run.directory ({settings.run.directory})": settings.run.directory,
        f"rollout.weights_directory ({settings.rollout.weights_directory})": settings.rollout.weights_directory,
    }
    found = {}
    for name, path in places.items():
        if path.is_dir():
            usage = shutil.disk_usage(path)
            found[name] = (usage.free, usage.total)
    return found
