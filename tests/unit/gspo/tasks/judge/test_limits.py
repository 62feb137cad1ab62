"""Limits on judges hold over processes, whatever becomes of them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from gspo.tasks.judge.limits import Pace, RequestPlaces

RESERVE = """
import sys
from pathlib import Path
from gspo.tasks.judge.limits import Pace
pace = Pace(Path(sys.argv[1]), per_minute=60, clock=lambda: 1000.0)
print("ready", flush=True)
sys.stdin.readline()
print(*(round(pace.reserve(), 3) for _ in range(500)))
"""
HOLD = """
import sys, time
from pathlib import Path
from gspo.tasks.judge.limits import RequestPlaces
assert RequestPlaces(Path(sys.argv[1]), 1).take() is not None
print("held", flush=True)
time.sleep(3600)
"""


def test_processes_together_keep_the_pace(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RESERVE, str(tmp_path / "folder" / "pace")]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    reserved = [float(each) for process in processes for each in process.communicate()[0].split()]
    assert sorted(reserved) == [float(second) for second in range(1500)], "no second is given twice, and none is left out"


def test_time_that_nobody_used_is_no_burst(tmp_path: Path) -> None:
    now = 1000.0
    pace = Pace(tmp_path / "pace", per_minute=60, clock=lambda: now)
    assert [pace.reserve() for _ in range(2)] == [0.0, 1.0]
    now = 2000.0
    assert [pace.reserve() for _ in range(3)] == [0.0, 1.0, 2.0]


def test_a_postponement_holds_for_all_and_never_shortens_the_row(tmp_path: Path) -> None:
    one, other = (Pace(tmp_path / "pace", per_minute=60, clock=lambda: 1000.0) for _ in range(2))
    one.postpone(30.0)
    assert other.reserve() == 30.0
    one.postpone(5.0)
    assert other.reserve() == 31.0


@pytest.mark.parametrize("content", ["", "x", "another-boot 99999999.0\n", "\xff\xfe", "a b c"])
def test_a_file_of_another_start_of_the_machine_or_a_damaged_one_is_as_new(tmp_path: Path, content: str) -> None:
    path = tmp_path / "pace"
    path.write_text(content, encoding="latin-1")
    pace = Pace(path, per_minute=60, clock=lambda: 1000.0)
    assert [pace.reserve(), pace.reserve()] == [0.0, 1.0]


def test_there_are_as_many_places_as_were_named_and_a_freed_one_is_taken_again(tmp_path: Path) -> None:
    places = RequestPlaces(tmp_path / "places", 2)
    held = [places.take(), RequestPlaces(tmp_path / "places", 2).take()]
    assert None not in held
    assert places.take() is None
    os.close(held[0])  # type: ignore[arg-type]
    again = places.take()
    assert again is not None
    for file in (held[1], again):
        os.close(file)  # type: ignore[arg-type]


async def test_a_place_is_waited_for_until_another_is_done_with_it(tmp_path: Path) -> None:
    places, order = RequestPlaces(tmp_path / "places", 1), []
    entered, leave = anyio.Event(), anyio.Event()

    async def first() -> None:
        async with places.one():
            entered.set()
            await leave.wait()
            order.append("first")

    async def second() -> None:
        await entered.wait()
        leave.set()
        async with places.one():
            order.append("second")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(first)
        tasks.start_soon(second)
    assert order == ["first", "second"]


def test_a_killed_process_holds_no_place(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == "held\n"
        places = RequestPlaces(tmp_path, 1)
        assert places.take() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
        place = places.take()
        assert place is not None
        os.close(place)
