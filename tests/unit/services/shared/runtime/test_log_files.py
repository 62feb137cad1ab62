"""Logs of bounded size: nothing is lost at a rotation, whoever writes and whatever is killed, suspended or full."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from gspo_services.shared.runtime.log_files import LogFile, LogLimits, read_end
from gspo_services.shared.runtime.output import PatientOutput
from tests.support.processes.small_disk import small_disk

MIB = 2**20


@pytest.fixture
def log(tmp_path: Path) -> LogFile:
    return LogFile(path=tmp_path / "broker.log", limits=LogLimits(max_bytes=1000, most_files=3))


@pytest.fixture
def descriptor(log: LogFile) -> Iterator[int]:
    number = os.open(log.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    yield number
    os.close(number)


def files(log: LogFile) -> list[str]:
    """The log's files, the oldest first."""
    return sorted((path.name for path in log.path.parent.iterdir()), reverse=True)


def content(log: LogFile) -> str:
    return "".join((log.path.parent / name).read_text() for name in files(log))


def test_a_full_log_is_rotated_and_the_oldest_file_is_removed(log: LogFile, descriptor: int) -> None:
    output = PatientOutput(descriptor, log)
    for number in range(100):
        output.write(f"{number:049}\n".encode())
    assert files(log) == ["broker.log.2", "broker.log.1", "broker.log"]
    kept = [int(line) for line in content(log).splitlines()]
    assert kept == list(range(kept[0], 100))
    assert len(kept) > 40
    assert all((log.path.parent / name).stat().st_size <= 1000 + 50 for name in files(log))


def test_a_log_below_its_limit_has_one_file(log: LogFile, descriptor: int) -> None:
    PatientOutput(descriptor, log).write(b"x" * 1000)
    log.keep(descriptor)
    assert files(log) == ["broker.log"]


def test_a_second_writer_follows_the_first_ones_rotation(log: LogFile, descriptor: int) -> None:
    second = os.open(log.path, os.O_WRONLY | os.O_APPEND)
    os.write(descriptor, b"x" * 1001)
    log.keep(descriptor)
    os.write(second, b"to the older file\n")
    log.keep(second)
    os.write(second, b"to the newest file\n")
    assert log.path.read_text() == "to the newest file\n"
    assert content(log).endswith("to the older file\nto the newest file\n")
    os.close(second)


def test_a_log_that_somebody_removed_is_begun_again(log: LogFile, descriptor: int) -> None:
    log.path.unlink()
    log.keep(descriptor)
    os.write(descriptor, b"here\n")
    assert log.path.read_text() == "here\n"


def test_nothing_waits_for_a_process_that_is_suspended_while_it_rotates(log: LogFile, descriptor: int) -> None:
    program = (
        "import fcntl, os, sys, time; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX); "
        "print(flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(log.path.parent)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        holder.send_signal(signal.SIGSTOP)
        os.write(descriptor, b"x" * 1001)
        log.keep(descriptor)
        assert files(log) == ["broker.log"]
        holder.kill()
    log.keep(descriptor)
    assert files(log) == ["broker.log.1", "broker.log"]


WRITER = """
import ctypes, os, sys
import structlog
from gspo_services.shared.runtime.logs import configure_logging
configure_logging("broker")
log = structlog.get_logger()
name, number = sys.argv[1], int(sys.argv[2])
for index in range(number):
    log.info(f"line-{index // 100}", writer=name, index=index)
    if index % 50 == 0:
        print(f"print {name}", flush=True)
ctypes.CDLL(None).perror(b"from C")
raise RuntimeError("the end of " + name)
"""


def test_processes_that_share_a_log_lose_nothing_and_a_traceback_is_in_the_newest_file(tmp_path: Path) -> None:
    log = LogFile(path=tmp_path / "learner.log", limits=LogLimits(max_bytes=2**16, most_files=40))
    with log.path.open("ab") as output:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", WRITER, name, "2000"],
                stdout=output,
                stderr=output,
                env=os.environ | log.environment(),
            )
            for name in ("zero", "one")
        ]
    assert [rank.wait() for rank in ranks] == [1, 1]
    text = content(log)
    assert len(files(log)) > 4
    for name in ("zero", "one"):
        found = [line for line in text.splitlines() if f'"writer": "{name}"' in line]
        assert len(found) == 2000
        assert text.count(f"print {name}\n") == 40
        assert f"RuntimeError: the end of {name}\n" in text
    assert text.count("from C: ") == 2
    assert "RuntimeError: the end of " in log.path.read_text()


def test_output_that_goes_elsewhere_is_left_alone(tmp_path: Path) -> None:
    log = LogFile(path=tmp_path / "learner.log", limits=LogLimits(max_bytes=1, most_files=2))
    log.path.touch()
    with (tmp_path / "mine").open("ab") as mine:
        command = [sys.executable, "-c", WRITER, "x", "10"]
        subprocess.run(command, stdout=mine, stderr=mine, check=False, env=os.environ | log.environment())
    assert log.path.read_text() == ""
    assert (tmp_path / "mine").read_text().count('"event": "line-0"') == 10


def test_a_full_disk_rotates_nothing_and_what_was_lost_is_counted(tmp_path: Path) -> None:
    with small_disk(tmp_path / "logs", MIB) as disk:
        log = LogFile(path=disk.path / "broker.log", limits=LogLimits(max_bytes=1000, most_files=3))
        descriptor = os.open(log.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        output = PatientOutput(descriptor, log)
        output.write(b"first\n")
        disk.fill()
        lines = [f"{number:099}\n".encode() for number in range(200)]
        for line in lines:
            assert output.write(line) == 100
        disk.empty()
        output.write(b"again\n")
        text = content(log).splitlines()
        os.close(descriptor)
    kept = sum(line.isdigit() and len(line) == 99 for line in text)
    assert text[0] == "first"
    assert text[-1] == "again"
    assert '"event": "log_lines_lost"' in text[-2]
    assert f'"number": {200 - kept}' in text[-2]
    assert kept < 200


def test_the_end_of_a_log_goes_back_into_its_older_file(log: LogFile) -> None:
    assert read_end(log.path, 100) == ""
    log.path.write_text("new\n")
    assert read_end(log.path, 100) == "new\n"
    Path(f"{log.path}.1").write_text("older\nold\n")
    assert read_end(log.path, 8) == "old\nnew\n"
    assert read_end(log.path, 100) == "older\nold\nnew\n"
    log.path.unlink()  # between two steps of a rotation
    assert read_end(log.path, 4) == "old\n"
    assert all(earlier != later for earlier, later in pairwise(read_end(log.path, 100).splitlines()))
