"""Whoever reads metrics.jsonl goes on after a damaged line, and says once what is left out."""

import asyncio
import warnings
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gspo.runs import BatchMetrics, Run
from gspo_services.broker.store import NoLedger
from gspo_services.cli.main import main
from gspo_services.cli.run import plot
from gspo_services.cli.run.display import Display
from gspo_services.cli.run.news import News
from gspo_services.runs.compare import compare_runs
from gspo_services.runs.metrics.follower import MOST_LINE_BYTES
from gspo_services.runs.scripting import run as run_module
from gspo_services.runs.track import Cursor, CursorFile, SampleReader
from gspo_services.runs.track.points import Point
from gspo_services.runs.track.session import Samples, TrackerSession
from gspo_services.runs.view import LearnerNumbers, PageAnswers, watched_runs
from gspo_services.shared.runtime.clock import MonotonicClock
from gspo_services.shared.runtime.console import PlainConsole
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings import read_run_settings
from tests.support.cli.statuses import a_status
from tests.support.runs.written_runs import write_run
from tests.support.tracking import ListTracker

Found = tuple[int, str]
"""Batches that a reader has found, and all that it said."""
Capture = pytest.CaptureFixture[str]


def plotted(run: Path, capsys: Capture) -> Found:
    status = main(["plot", str(run)])
    said = capsys.readouterr()
    rows = [line.split("│") for line in said.out.splitlines() if "batches trained" in line]
    assert (run / "plot.png").is_file() == (not status)
    return int(rows[0][3]) if rows else 0, said.out + said.err


def compared(run: Path, _: Capture) -> Found:
    other = run.parent / "other"
    comparison = compare_runs([run, other if other.exists() else write_run(other, [0.0, 0.5])])
    return comparison.groups[0].runs[0].num_trained, "\n".join(comparison.notes)


def viewed(run: Path, _: Capture) -> Found:
    runs = watched_runs([run], MonotonicClock())
    answers = PageAnswers(runs, LearnerNumbers(run.parent / "cache"))
    try:
        shown = asyncio.run(answers.overview(runs["run"]))
    finally:
        runs["run"].close()
    return len(shown["columns"]["batch"]), shown["error"]


def tracked(run: Path, _: Capture) -> Found:
    (run / "trackers").mkdir(exist_ok=True)
    points: list[Point] = []
    samples = Samples(reader=SampleReader(run, run), most=0)
    session = TrackerSession(run, CursorFile(run, "x"), Cursor(tracker_run="r"), lambda: ListTracker(points), samples)
    with capture_logs() as logs:
        session.send()
    said = "\n".join(entry["damage"] for entry in logs if entry["event"] == "lines_left_out")
    return sum(point.event == "batch" for point in points), said


def scripted(run: Path, _: Capture) -> Found:
    with warnings.catch_warnings(record=True, action="always") as caught:
        found = Run.open(run).metrics()
    return len(found), "\n".join(str(each.message) for each in caught)


def watched(run: Path, _: Capture) -> Found:
    with warnings.catch_warnings(record=True, action="always") as caught:
        found = [event for event in Run.open(run).watch(timeout_s=60) if isinstance(event, BatchMetrics)]
    return len(found), "\n".join(str(each.message) for each in caught)


def shown(run: Path, _: Capture) -> Found:
    output = StringIO()
    news = News(read_run_settings(run))
    with Display(PlainConsole(file=output, width=400), "run", look="quiet") as display:
        for elapsed_s in (0.0, 1.0):
            asyncio.run(news.bring(display, a_status(batches_checkpointed=0), [], elapsed_s))
        last = display.progress.last_batch
    return last["batch"] + 1 if last else 0, output.getvalue()


READERS = [plotted, compared, viewed, tracked, scripted, watched, shown]
DAMAGED = [
    (b'{"line": 3, "event": "ba', "not JSON"),
    (b'\xff\xfe{"line": 3}', "not UTF-8"),
    (b"[3]", "not a JSON object"),
    (b'{"event": "batch", "batch": 7}', 'no number ("line")'),
    (b'{"line": 3, "event": "batch", "batch": "7"}', 'no "batch" that can be used'),
    (b'{"line": 2, "event": "batch", "batch": 7}', "its number is 2, and the line before it has 2"),
    (b"y" * (MOST_LINE_BYTES + 1), f"longer than {MOST_LINE_BYTES} bytes"),
]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """It has trained two batches: lines 2 and 3 of four."""
    monkeypatch.setattr(plot, "DPI", 20)
    monkeypatch.setattr(run_module, "QUIET_S", 0.0)
    monkeypatch.setenv("COLUMNS", "400")
    return write_run(tmp_path / "run", [0.0, 0.5])


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(("damaged", "reason"), DAMAGED, ids=[reason for _, reason in DAMAGED])
def test_a_damaged_line_is_left_out_and_told_once(
    damaged: bytes, reason: str, read: Callable[[Path, Capture], Found], run: Path, capsys: Capture
) -> None:
    path = run / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], damaged + b"\n", *lines[2:]]))
    num_batches, said = read(run, capsys)
    assert num_batches == 2
    assert said.count(f"{path}: 1 damaged line is left out; the first is line 3: {reason}") == 1


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("end", [b'{"line": 5, "event": "ba', b"\0" * 5000, b"\n"], ids=["half a line", "a hole", "blank"])
def test_what_is_still_being_written_is_no_damage(
    end: bytes, read: Callable[[Path, Capture], Found], run: Path, capsys: Capture
) -> None:
    path = run / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + end)
    num_batches, said = read(run, capsys)
    assert num_batches == 2
    assert "damaged" not in said


EMPTY = [
    (plotted, "no batch and no evaluation recorded yet, nothing to draw"), (compared, "no batch and no evaluation yet"),
    (viewed, "is no run directory"), (tracked, ""), (scripted, ""), (watched, ""), (shown, ""),
]  # fmt: skip
MISSING = [
    (plotted, "the broker writes it when it starts"), (compared, "the broker writes it when it starts"),
    (viewed, "is no run directory"), (tracked, ""), (scripted, "holds no run"), (watched, "holds no run"), (shown, ""),
]  # fmt: skip


@pytest.mark.parametrize(
    ("is_there", "read", "words"), [*((True, *each) for each in EMPTY), *((False, *each) for each in MISSING)]
)
def test_a_run_that_has_written_nothing_has_no_batch_and_no_damage(
    is_there: bool, read: Callable[[Path, Capture], Found], words: str, run: Path, capsys: Capture
) -> None:
    (run / "metrics.jsonl").unlink()
    if is_there:
        (run / "metrics.jsonl").touch()
    try:
        num_batches, said = read(run, capsys)
    except (ConfigurationError, NoLedger) as error:
        num_batches, said = 0, str(error)
    assert num_batches == 0
    assert words in said
    assert "damaged" not in said
