"""Calls a function in a fork of this process, under a limit on processor time.

So whatever an answer makes a verifier do - raise, recurse, compute for ever, end the process, change the package - costs
that answer its score, and nothing else. Python's own limits do not
reach a power of two large integers; the kernel's limit on processor time does, and a busy machine costs nobody anything.
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
"""The clock allows many times the processor time: it is for a call that sleeps."""
MOST_FILES: Final = 4096
PIECE_BYTES: Final = 2**16
_DONE: Final = b"+"
_RAISED: Final = b"!"
_SCORE: Final = struct.Struct("<d")
_FAULTS: Final = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)


class Said(NamedTuple):
    """What a call returned."""

    value: bytes
    failure: Failure = ""
    """unscored: it raised, or ended its process."""


class Verdict(NamedTuple):
    """What came of one call of a verifier."""

    score: float
    failure: Failure = ""


def scored(call: Callable[[], float], cpu_s: float, *, least_wall_s: float = LEAST_WALL_S) -> Verdict:
    """The score that ``call`` returns in a fork; unscored for one that is no finite number. Raises: as ``in_a_fork``."""
    said = in_a_fork(lambda: _SCORE.pack(call()), cpu_s, least_wall_s=least_wall_s)
    if said.failure:
        return Verdict(0.0, said.failure)
    (value,) = _SCORE.unpack(said.value) if len(said.value) == _SCORE.size else (math.nan,)
    return Verdict(value) if math.isfinite(value) else Verdict(0.0, "unscored")


def in_a_fork(call: Callable[[], bytes], cpu_s: float, *, least_wall_s: float = LEAST_WALL_S) -> Said:
    """What ``call`` returns in a copy of this process. ``cpu_s`` is rounded up to whole seconds.

    Raises: RuntimeError when something else than the call or its limits has ended the copy.
    """
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        _answer(call, sending, math.ceil(cpu_s))
    os.close(sending)
    try:
        received = _received(receiving, max(least_wall_s, WALL_OVER_CPU * cpu_s))
    finally:
        os.close(receiving)
        with suppress(ProcessLookupError):
            # What the call has started, too.
            os.killpg(child, signal.SIGKILL)
        _, status, used = os.wait4(child, 0)
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if received is None or ended_by == signal.SIGXCPU:
        return Said(b"", "too_slow")
    if received[:1] == _DONE and not ended_by:
        return Said(received[1:])
    if ended_by and used.ru_utime + used.ru_stime >= cpu_s:
        return Said(b"", "too_slow")
    if received or not ended_by or ended_by in _FAULTS:
        return Said(b"", "unscored")
    raise RuntimeError(f"the process of a call was ended by {signal.Signals(ended_by).name}, which is not the call's doing")


def _answer(call: Callable[[], bytes], sending: int, limit_s: int) -> NoReturn:
    """In the copy: call, tell, end."""
    try:
        os.setpgid(0, 0)
        _shut_all_but(sending)
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s + 1 if hard == resource.RLIM_INFINITY else hard))
        for number in (signal.SIGXCPU, signal.SIGTERM, signal.SIGINT):
            # A command's own handlers would make an end from outside look like the call's answer.
            signal.signal(number, signal.SIG_DFL)
        _send(sending, _DONE + call())
    # An answer may make the verifier raise anything, SystemExit and MemoryError too.
    except BaseException:  # noqa: BLE001
        _send(sending, _RAISED)
    finally:
        os._exit(0)


def _send(sending: int, content: bytes) -> None:
    while content:
        content = content[os.write(sending, content) :]


def _shut_all_but(sending: int) -> None:
    """Leave the call no file of the worker's: its jobs come through one, and its results go through another."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
    os.closerange(3, sending)
    os.closerange(sending + 1, MOST_FILES)


def _received(receiving: int, patience_s: float) -> bytes | None:
    """What the copy has sent until it closed its end; None when it is silent for too long."""
    pieces: list[bytes] = []
    with selectors.DefaultSelector() as selector:
        selector.register(receiving, selectors.EVENT_READ)
        while selector.select(patience_s):
            piece = os.read(receiving, PIECE_BYTES)
            if not piece:
                return b"".join(pieces)
            pieces.append(piece)
    return None
