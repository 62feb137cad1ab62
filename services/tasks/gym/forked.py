"""Calls a function in a fork of this process, under a limit on processor time.

So whatever an answer makes a verifier do - raise, recurse, compute for ever, end the process, change the package - costs that
answer its score, and nothing else. Python's own limits do not reach a power of two large integers; the kernel's limit on
processor time does, and a busy machine costs no answer anything.
"""

from __future__ import annotations

import math
import os
import resource
import selectors
import signal
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Literal, NamedTuple, NoReturn

Failure = Literal["", "unscored", "too_slow"]
WALL_OVER_CPU: Final = 6.0
LEAST_WALL_S: Final = 30.0
"""The clock allows many times the processor time: it is for a verifier that sleeps."""
MOST_FILES: Final = 4096
_SCORE: Final = struct.Struct("<d")
_FAULTS: Final = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)


class Verdict(NamedTuple):
    """What came of one call of a verifier."""

    score: float
    failure: Failure = ""


def in_a_fork(call: Callable[[], float], cpu_s: float, *, least_wall_s: float = LEAST_WALL_S) -> Verdict:
    """What ``call`` returns in a copy of this process.

    Raises: RuntimeError when something else than the call or its limits has ended the copy.
    """
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        _answer(call, sending, cpu_s)
    os.close(sending)
    try:
        said = _received(receiving, max(least_wall_s, WALL_OVER_CPU * cpu_s))
    finally:
        os.close(receiving)
        with suppress(ProcessLookupError):
            # What the call has started, too.
            os.killpg(child, signal.SIGKILL)
        _, status, used = os.wait4(child, 0)
    if said is None:
        return Verdict(0.0, "too_slow")
    if len(said) == _SCORE.size:
        (value,) = _SCORE.unpack(said)
        return Verdict(value) if math.isfinite(value) else Verdict(0.0, "unscored")
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if ended_by == signal.SIGXCPU or used.ru_utime + used.ru_stime >= cpu_s:
        return Verdict(0.0, "too_slow")
    if said or not ended_by or ended_by in _FAULTS:
        return Verdict(0.0, "unscored")
    raise RuntimeError(f"the process of the verifier was ended by {signal.Signals(ended_by).name}, which is not its doing")


def _answer(call: Callable[[], float], sending: int, cpu_s: float) -> NoReturn:
    """In the copy: call, tell, end."""
    try:
        os.setpgid(0, 0)
        _shut_all_but(sending)
        limit = math.ceil(cpu_s)
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 1 if hard == resource.RLIM_INFINITY else hard))
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        os.write(sending, _SCORE.pack(call()))
    # An answer may make the verifier raise anything, SystemExit and MemoryError too.
    except BaseException:  # noqa: BLE001
        os.write(sending, b"!")
    finally:
        os._exit(0)


def _shut_all_but(sending: int) -> None:
    """Leave the call no file of the worker's: its jobs come through one, and its results go through another."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
    os.closerange(3, sending)
    os.closerange(sending + 1, MOST_FILES)


def _received(receiving: int, patience_s: float) -> bytes | None:
    """What the copy has sent until it closed its end; None when that takes too long."""
    said = b""
    with selectors.DefaultSelector() as selector:
        selector.register(receiving, selectors.EVENT_READ)
        while selector.select(patience_s):
            piece = os.read(receiving, _SCORE.size + 1)
            if not piece:
                return said
            said += piece
    return None
