"""What the user's code has started ends also when the process that would have ended it was killed."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gspo_services.shared.runtime.stray_processes import MARK, kill_marked, kill_orphans, new_mark

WAITS = (sys.executable, "-c", "import sys; sys.stdin.read()")


@contextmanager
def a_process(**environment: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A daemon, as the user's code would leave it."""
    process = subprocess.Popen(WAITS, stdin=subprocess.PIPE, env={**os.environ, **environment}, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_daemon_of_a_killed_owner_is_ended_and_no_other() -> None:
    with a_process() as owner:
        mark = new_mark(owner.pid)
        elsewhere = "-".join(["1", *mark.split("-")[1:]])
        with (
            a_process(**{MARK: mark}) as stray, a_process(**{MARK: elsewhere}) as hidden,
            a_process(**{MARK: "0123"}) as older, a_process(**{MARK: new_mark()}) as ours,
        ):  # fmt: skip
            kill_orphans()
            assert [each.poll() for each in (stray, hidden, older, ours)] == [None] * 4
            owner.kill()
            # Nobody has waited for it yet: it has ended all the same.
            os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)
            assert kill_orphans() >= 1
            assert stray.wait(10) == -9
            assert [each.poll() for each in (hidden, older, ours)] == [None] * 3


def test_a_number_that_another_process_has_by_now_is_no_owner() -> None:
    with a_process() as other:
        place, pid, start, token = new_mark(other.pid).split("-")
        with a_process(**{MARK: "-".join([place, pid, str(int(start) - 1), token])}) as stray:
            kill_orphans()
            assert stray.wait(10) == -9


def test_a_program_that_is_just_being_started_is_ended_as_soon_as_it_shows_its_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """``subprocess`` returns before the kernel shows the new program's environment."""
    read = Path.read_bytes
    mark = new_mark()
    with a_process(**{MARK: mark}) as stray:
        shown = read(Path(f"/proc/{stray.pid}/stat"))
        name, end, rest = shown.rpartition(b")")
        fields = rest.split()
        fields[47:49] = [b"0", b"0"]
        answers = {
            f"/proc/{stray.pid}/environ": [b""] * 3,
            f"/proc/{stray.pid}/stat": [shown, name + end + b" " + b" ".join(fields)] * 3,
        }

        def early(path: Path) -> bytes:
            left = answers.get(str(path))
            return left.pop(0) if left else read(path)

        monkeypatch.setattr(Path, "read_bytes", early)
        assert kill_marked(mark, None) == 1
        assert stray.wait(10) == -9
        assert not any(answers.values())


def test_a_program_without_any_variables_is_waited_for_by_nobody() -> None:
    process = subprocess.Popen(WAITS, stdin=subprocess.PIPE, env={})
    try:
        assert kill_marked(new_mark(), None) == 0
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()
