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
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

MARK: Final = "GSPO_USER_PROCESS"
_MOST_ROUNDS: Final = 50
_MOMENT_S: Final = 0.01
_STARTING_S: Final = 60.0
_START, _SIZE, _ENVIRONMENT_END = 19, 20, 48
"""Fields of /proc/PID/stat, from the state on."""


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


def _kill_all(is_wanted: Callable[[int], bool | None]) -> int:
    """``is_wanted``: None: not known yet."""
    killed: set[int] = set()
    for _ in range(_MOST_ROUNDS):
        # Again, because the processes found may have started more before they were killed.
        judged = {pid: is_wanted(pid) for pid in _pids()}
        found = [pid for pid, wanted in judged.items() if wanted]
        if not found and None not in judged.values():
            break
        if not found:
            time.sleep(_MOMENT_S)
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
    return None if fields[0] in (b"Z", b"X") else fields[_START].decode()


def _variables(pid: int) -> list[bytes] | None:
    """A process's environment; None: it has none yet. Raises: OSError.

    A program that is being started has closed its parent's pipe, so that ``subprocess`` returns, before it can be read. On a
    machine with much to do it may stay so for long.
    """
    content = Path(f"/proc/{pid}/environ").read_bytes()
    if not content:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[_START]) / os.sysconf("SC_CLK_TCK")
        # The kernel's own have no memory, one without variables has a place for them, and of some nobody is told.
        if int(fields[_SIZE]) and not int(fields[_ENVIRONMENT_END]) and age_s < _STARTING_S:
            return None
    return content.split(b"\0")


def _is_orphan(pid: int, namespace: str) -> bool | None:
    """Return whether a live process carries a mark of an owner in ``namespace`` that has ended; None: not known yet."""
    try:
        variables = _variables(pid)
    except OSError:
        return False
    if variables is None:
        return None
    name = f"{MARK}=".encode()
    mark = next((each[len(name) :].decode(errors="replace") for each in variables if each.startswith(name)), "")
    place, _, rest = mark.partition("-")
    owner, _, rest = rest.partition("-")
    start, _, _ = rest.partition("-")
    if place != namespace or not owner.isdecimal() or not start or pid == os.getpid():
        return False
    return _start_of(int(owner)) != start and _start_of(pid) is not None


def _belongs(pid: int, wanted: bytes, leader: int | None) -> bool | None:
    """Return whether a live process carries the mark or is in the leader's group or session; None: not known yet."""
    if pid == os.getpid():
        return False
    try:
        # The name, in parentheses, may contain anything: read from after its end.
        state, _, group, session = (Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2]).split()[:4]
        if state in (b"Z", b"X"):
            return False
        if leader is not None and leader in (int(group), int(session)):
            return True
        variables = _variables(pid)
        return None if variables is None else wanted in variables
    except (OSError, ValueError):
        return False
