"""Who owns an operation: one writer of a target, many readers of a run, and the dead told from the living."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from gspo_services.shared.runtime import operations
from gspo_services.shared.runtime.errors import OccupiedError
from gspo_services.shared.runtime.operations import PREFIX, OperationOwner, is_under_way, only_operation, operation_on

HOLDS = """
import sys
from pathlib import Path
from gspo_services.shared.runtime.operations import only_operation, operation_on
with only_operation(Path(sys.argv[1]), "restore", ""), operation_on(Path(sys.argv[2]), "replay") as name:
    print(name, flush=True)
    sys.stdin.read()
"""


@contextmanager
def held(target: Path, run: Path) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """Another process that writes to ``target`` and reads ``run``."""
    command = [sys.executable, "-c", HOLDS, str(target), str(run)]
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def left_in(directory: Path) -> list[str]:
    return [path.name for path in directory.glob(f"{PREFIX}*")]


def test_the_second_says_who_is_at_work_and_the_dead_leave_nothing(tmp_path: Path) -> None:
    (run := tmp_path / "run").mkdir()
    target = tmp_path / "new" / "target"
    with held(target, run) as (process, name):
        here = rf"another `gspo restore` of .* on .* \(process {process.pid}\) since 20.* UTC is writing to {target}: wait"
        with pytest.raises(OccupiedError, match=here), only_operation(target, "export", "wait for it"):
            pass
        assert is_under_way(run, name)
        with operation_on(run, "export") as other:  # Readers run side by side.
            assert is_under_way(run, other)
            assert is_under_way(run, name)
        with pytest.raises(OccupiedError, match=r"another `gspo replay` of .* is at work on .*: wait"):
            with operation_on(run, "accept-loss", alone=True):
                pass
        process.kill()
        process.wait()
        assert left_in(run) == [f"{PREFIX}{name}"]
        with only_operation(target, "export", "wait for it"):
            pass
        assert not is_under_way(run, name)
    assert left_in(run) == left_in(target.parent) == []


def test_nobody_joins_one_that_has_to_be_alone(tmp_path: Path) -> None:
    with operation_on(tmp_path, "accept-loss", alone=True):
        with pytest.raises(OccupiedError, match=r"another `gspo accept-loss` of .* is at work on"):
            with operation_on(tmp_path, "backup"):
                pass
    with operation_on(tmp_path, "backup"):
        pass
    assert left_in(tmp_path) == []


def test_of_many_that_begin_at_once_one_has_it_at_a_time(tmp_path: Path) -> None:
    inside, most, begun = [0], [0], threading.Barrier(8)
    taken = []

    def take() -> None:
        begun.wait()
        for _ in range(25):
            try:
                with only_operation(tmp_path / "x", "export", ""):
                    inside[0] += 1
                    most[0] = max(most[0], inside[0])
                    taken.append(1)
                    inside[0] -= 1
            except OccupiedError:
                continue

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]
    assert len(taken) > 8
    assert left_in(tmp_path) == []


def of_another_host(path: Path) -> None:
    """The file of an owner on another host, whose locks are not seen here."""
    owner = msgspec.structs.replace(OperationOwner.here("backup"), boot="another kernel", host="node-7")
    path.write_bytes(msgspec.json.encode(owner))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Time passes at once: what happens at each look of one that waits for a beat."""

    def at_each_look(act: Callable[[], object]) -> None:
        now = [0.0]

        def sleep(seconds: float) -> None:
            now[0] += seconds
            act()

        monkeypatch.setattr(operations.time, "sleep", sleep)
        monkeypatch.setattr(operations.time, "monotonic", lambda: now[0])

    return at_each_look


def test_an_owner_on_another_host_lives_as_long_as_it_beats_whatever_the_clocks_say(
    tmp_path: Path, quick: Callable[[Callable[[], object]], None]
) -> None:
    file = tmp_path / f"{PREFIX}target"
    of_another_host(file)
    os.utime(file, ns=(1, 1))
    beats = iter(range(2, 10))
    quick(lambda: os.utime(file, ns=(1, next(beats))))  # Its clock is in 1970.
    with pytest.raises(OccupiedError, match="on node-7"), only_operation(tmp_path / "target", "export", ""):
        pass
    quick(lambda: None)
    with only_operation(tmp_path / "target", "export", ""):
        pass
    assert left_in(tmp_path) == []


def test_the_thread_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beat, plain = threading.Event(), os.utime

    def utime(*arguments: int) -> None:
        plain(*arguments)
        beat.set()

    monkeypatch.setattr(operations, "BEAT_S", 0.01)
    monkeypatch.setattr(operations.os, "utime", utime)
    with operation_on(tmp_path, "export"):
        assert beat.wait(10)


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 5000, b"\0" * 9000])
def test_a_file_of_nonsense_is_nobodys(content: bytes, tmp_path: Path) -> None:
    (tmp_path / f"{PREFIX}target").write_bytes(content)
    with only_operation(tmp_path / "target", "export", ""):
        pass
    assert left_in(tmp_path) == []


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / f"{PREFIX}target").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"), only_operation(tmp_path / "target", "export", ""):
        pass
    assert (tmp_path / "precious").read_text() == "precious"
