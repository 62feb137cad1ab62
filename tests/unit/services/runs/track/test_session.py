"""Sending a run to a tracker: once, from where the tracker stands, whatever the tracker and the cursor do."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from gspo_services.runs.track import Cursor, CursorFile, SampleReader
from gspo_services.runs.track import session as module
from gspo_services.runs.track.clients import Tracker
from gspo_services.runs.track.command import first_cursor
from gspo_services.runs.track.points import Point
from gspo_services.runs.track.samples import SampleTable
from gspo_services.runs.track.session import Samples, TrackerRefused, TrackerSession
from gspo_services.shared.runtime.errors import OccupiedError
from tests.support.tracking import ListTracker, write_rows


def a_session(directory: Path, opener: Callable[[], Tracker], cursor: Cursor | None = None) -> TrackerSession:
    samples = Samples(reader=SampleReader(directory, directory), most=0)
    return TrackerSession(directory, CursorFile(directory, "x"), cursor or Cursor(tracker_run="r"), opener, samples)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "trackers").mkdir()
    write_rows(tmp_path, 5)
    return tmp_path


def losses(points: list[Point]) -> list[float]:
    return [point.values["train/loss"] for point in points]


def test_all_is_sent_and_the_cursor_says_so(run: Path) -> None:
    points: list[Point] = []
    assert a_session(run, lambda: ListTracker(points)).send() == 5
    assert losses(points) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert CursorFile(run, "x").read() == Cursor(tracker_run="r", line=5)


def test_a_second_time_sends_only_what_is_new(run: Path) -> None:
    points: list[Point] = []
    first = a_session(run, lambda: ListTracker(points, knows=False))
    first.send()
    write_rows(run, 7, 5)
    assert a_session(run, lambda: ListTracker(points, knows=False), first.cursor).send() == 7
    assert [point.batch for point in points] == list(range(7))


def test_the_tracker_itself_says_where_to_go_on_when_a_killed_sender_did_not(run: Path) -> None:
    points: list[Point] = []
    a_session(run, lambda: ListTracker(points)).send()
    behind = Cursor(tracker_run="r", line=2)
    assert a_session(run, lambda: ListTracker(points), behind).send() == 5
    assert [point.batch for point in points] == list(range(5)), "nothing is doubled"
    del points[3:]
    ahead = Cursor(tracker_run="r", line=5)
    a_session(run, lambda: ListTracker(points), ahead).send()
    assert [point.batch for point in points] == list(range(5)), "nothing is missing"


def test_a_tracker_that_refuses_is_an_error_with_its_words_and_nothing_is_lost(run: Path) -> None:
    points: list[Point] = []
    tracker = ListTracker(points, fails_at=3)
    session = a_session(run, lambda: tracker)
    with pytest.raises(TrackerRefused, match="ConnectionError: the server is gone"):
        session.send()
    assert session.send() == 5
    assert [point.batch for point in points] == list(range(5))


def test_a_follower_tries_again_and_notes_the_error_meanwhile(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_RETRY_S", 0.01)
    points: list[Point] = []
    stop = threading.Event()
    errors: list[str] = []
    opened: list[int] = []

    def opener() -> Tracker:
        opened.append(1)
        if len(opened) < 3:
            raise PermissionError("no key")
        cursor = CursorFile(run, "x").read()
        errors.append(cursor.error if cursor else "")
        stop.set()
        return ListTracker(points)

    with capture_logs():
        a_session(run, opener).follow(stop)
    assert errors == ["PermissionError: no key"]
    assert len(points) == 5
    assert CursorFile(run, "x").read() == Cursor(tracker_run="r", line=5)


def test_a_follower_sends_what_is_there_when_it_is_stopped(run: Path) -> None:
    points: list[Point] = []
    stop = threading.Event()
    seen = threading.Event()

    class Told(ListTracker):
        def write(self, point: Point, samples: SampleTable | None) -> None:
            super().write(point, samples)
            if point.batch == 4:
                seen.set()

    thread = threading.Thread(target=a_session(run, lambda: Told(points)).follow, args=(stop,))
    thread.start()
    assert seen.wait(60)
    write_rows(run, 9, 5)
    stop.set()
    thread.join(60)
    assert not thread.is_alive()
    assert [point.batch for point in points] == list(range(9))


def test_a_full_disk_costs_the_cursor_and_not_the_points(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(CursorFile, "write", full)
    points: list[Point] = []
    with capture_logs() as logs:
        assert a_session(run, lambda: ListTracker(points)).send() == 5
    assert len(points) == 5
    assert {entry["event"] for entry in logs} == {"cursor_not_written"}


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"tracker_run": 3}', b'{"tracker_run": "a", "more": 1}', b"\xff\xfe", b"\0" * 64]
)
def test_a_damaged_cursor_begins_a_new_run_of_the_tracker_and_is_kept(content: bytes, run: Path) -> None:
    file = CursorFile(run, "x")
    file.path.write_bytes(content)
    with capture_logs() as logs:
        cursor = first_cursor(file, "my run", "id")
    assert cursor.tracker_run.startswith("my-run-")
    assert (cursor.line, cursor.run_id) == (0, "id")
    assert [entry["event"] for entry in logs] == ["cursor_damaged"]
    (kept,) = file.path.parent.glob("x.damaged-*")
    assert kept.read_bytes() == content
    assert first_cursor(file, "my run", "id") == cursor


def test_another_run_in_the_same_directory_is_another_run_of_the_tracker(run: Path) -> None:
    file = CursorFile(run, "x")
    file.write(Cursor(tracker_run="old", run_id="a", line=9))
    assert first_cursor(file, "n", "").tracker_run == "old", "the ledger does not say"
    with capture_logs():
        new = first_cursor(file, "n", "b")
    assert (new.tracker_run != "old", new.line, new.run_id) == (True, 0, "b")


def test_a_cursor_learns_its_run_when_the_ledger_is_there(run: Path) -> None:
    file = CursorFile(run, "x")
    file.write(Cursor(tracker_run="old", line=9))
    assert first_cursor(file, "n", "b") == Cursor(tracker_run="old", run_id="b", line=9)


def test_two_senders_of_one_run_to_one_tracker_exclude_each_other(run: Path) -> None:
    file = CursorFile(run, "x")
    with file.locked():
        with pytest.raises(OccupiedError, match="another process already sends this run to x"):
            with CursorFile(run, "x").locked():
                pass
        with CursorFile(run, "y").locked():
            pass
    with file.locked():
        pass
