"""The lock of a shared device: one holder at a time, and none that has ended."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gspo_services.shared.colocate import LOCK_FILE, DeviceLock, device_holder
from gspo_services.shared.runtime.errors import ConfigurationError

HOLDER = """
import signal, subprocess, sys
from pathlib import Path
from gspo_services.shared.colocate import DeviceLock
lock = DeviceLock(Path(sys.argv[1]), "killed")
assert lock.try_take()
kept = (lock.fileno(),) if sys.argv[2:] else ()
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=sys.stdin, pass_fds=kept)
print(child.pid, flush=True)
signal.pause()
"""


def two(path: Path) -> tuple[DeviceLock, DeviceLock]:
    return DeviceLock(path, "learner"), DeviceLock(path, "rollout-0")


def test_only_one_holds_the_lock_and_the_other_reads_who(tmp_path: Path) -> None:
    path = tmp_path / "run" / LOCK_FILE
    assert device_holder(path) == ""
    learner, rollout = two(path)
    assert (learner.try_take(), learner.try_take(), rollout.try_take()) == (True, True, False)
    assert (learner.held, rollout.held, rollout.holder, device_holder(path)) == (True, False, "learner", "learner")
    rollout.give_back()  # It has none: the learner's stays.
    assert (rollout.try_take(), rollout.holder) == (False, "learner")
    learner.give_back()
    assert rollout.holder == ""
    assert rollout.try_take()
    assert (learner.try_take(), learner.holder) == (False, "rollout-0")
    rollout.close()
    assert learner.try_take()
    learner.close()


@pytest.mark.parametrize("inherited", [False, True])
def test_a_killed_holders_lock_is_free_once_no_process_has_the_file_open(inherited: bool, tmp_path: Path) -> None:
    lock = DeviceLock(tmp_path / LOCK_FILE, "next")
    command = [sys.executable, "-c", HOLDER, str(tmp_path / LOCK_FILE), *["pass"][: int(inherited)]]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        try:
            assert (lock.try_take(), lock.holder) == (False, "killed")
            holder.kill()
            holder.wait()
            assert lock.try_take() is not inherited
        finally:
            pidfd = os.pidfd_open(child)
            os.kill(child, signal.SIGKILL)
            select.select([pidfd], [], [], 30)  # Until it has ended.
            os.close(pidfd)
    assert lock.try_take()
    lock.close()


def test_a_directory_that_cannot_be_written_is_named_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"file/device\.lock cannot be locked: .*; run\.colocate needs .* = false"):
        DeviceLock(tmp_path / "file" / LOCK_FILE, "learner")
