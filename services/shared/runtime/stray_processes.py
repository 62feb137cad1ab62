"""Ends every process that the user's code has started, even those that have left its process group.

A daemon leaves the group and the session of the process that started it, but keeps its environment. So each process of
the user's code gets a variable with a value of its own, and whatever carries that value is killed. The value also says who
gave it, so that others can do so when that process was killed itself. A program that also clears its environment escapes; a
container ends it.
"""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Final

MARK: Final = "GSPO_USER_PROCESS"
_MOST_ROUNDS: Final = 50


def new_mark(owner: int | None = None) -> str:
    """Return a value for the variable ``MARK`` that no other process has. ``owner``: a process; None: this one."""
    pid = os.getpid() if owner is None else owner
    return "-".join([_namespace(), str(pid), _start_of(pid) or "0", secrets.token_hex(16)])


def ended_as(status: int) -> str:
    """Describe how a process ended, by the exit status that ``subprocess`` gives it."""
    if status >= 0:
        return f"exit status {status}"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    return "SIGXCPU: its limit on CPU time" if name == "SIGXCPU" else name


def kill_marked(mark: str, leader: int | None) -> int:
    """Kill what carries ``mark`` and the group and session of ``leader``, until nothing is left. Returns how many it killed.

    Reads /proc, some 10 ms: call it in a thread. Without /proc it kills the group alone.
    """
    wanted = f"{MARK}={mark}".encode()
    return _kill_all(lambda pid: _belongs(pid, wanted, leader))


def kill_orphans() -> int:
    """Kill what carries a mark whose owner has ended, as by SIGKILL, without having killed it. Returns how many it killed.

    Owners in other containers are not visible from here, and what is theirs is left alone. It takes as long as
    ``kill_marked``.
    """
    namespace = _namespace()
    return _kill_all(lambda pid: _is_orphan(pid, namespace))


def _kill_all(is_wanted: Callable[[int], bool]) -> int:
    killed: set[int] = set()
    for _ in range(_MOST_ROUNDS):
        # Again, because the processes found may have started more before they were killed.
        found = [pid for pid in _pids() if is_wanted(pid)]
        if not found:
            break
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            except ProcessLookupError:
                continue
            except PermissionError:
                killed.discard(pid)
    return len(killed)


def _pids() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


def _namespace() -> str:
    """The namespace in which this process has its number; "" without /proc."""
    try:
        return os.readlink("/proc/self/ns/pid").strip("pid:[]")
    except OSError:
        return ""


def _start_of(pid: int) -> str | None:
    """When a process started, in the kernel's ticks; None for one that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else fields[19].decode()


def _is_orphan(pid: int, namespace: str) -> bool:
    """Return whether a live process carries a mark of an owner in ``namespace`` that has ended."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    name = f"{MARK}=".encode()
    mark = next((each[len(name) :].decode(errors="replace") for each in variables if each.startswith(name)), "")
    place, _, rest = mark.partition("-")
    owner, _, rest = rest.partition("-")
    start, _, _ = rest.partition("-")
    if place != namespace or not owner.isdecimal() or not start or pid == os.getpid():
        return False
    return _start_of(int(owner)) != start and _start_of(pid) is not None


def _belongs(pid: int, wanted: bytes, leader: int | None) -> bool:
    """Return whether a live process carries the mark or is in the leader's group or session."""
    if pid == os.getpid():
        return False
    try:
        # The name, in parentheses, may contain anything: read from after its end.
        state, _, group, session = (Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2]).split()[:4]
        if state in (b"Z", b"X"):
            return False
        if leader is not None and leader in (int(group), int(session)):
            return True
        return wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (OSError, ValueError):
        return False
