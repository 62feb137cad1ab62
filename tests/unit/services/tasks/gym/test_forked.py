"""Whatever a verifier does with an answer, that answer has a score, and the process of the others goes on."""

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from gspo_services.tasks.gym.forked import Said, Verdict, in_a_fork, scored

UNSCORED, TOO_SLOW = Verdict(0.0, "unscored"), Verdict(0.0, "too_slow")


def raises(error: BaseException) -> float:
    raise error


def recurses(depth: int = 0) -> float:
    return recurses(depth + 1)


def leaves_a_process() -> float:
    """Its child would keep the pipe for a minute."""
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    return 1.0


def ends(number: int) -> float:
    os.kill(os.getpid(), number)
    return 1.0


@pytest.mark.parametrize(
    ("call", "verdict"),
    [
        (lambda: 1.0, Verdict(1.0)),
        (lambda: 0.25, Verdict(0.25)),
        (lambda: -3.0, Verdict(-3.0)),
        (lambda: float("nan"), UNSCORED),
        (lambda: float("inf"), UNSCORED),
        (lambda: float(10**400), UNSCORED),
        (lambda: raises(ValueError()), UNSCORED),
        (lambda: raises(MemoryError()), UNSCORED),
        (lambda: raises(KeyboardInterrupt()), UNSCORED),
        (lambda: sys.exit(0), UNSCORED),
        (lambda: os._exit(0), UNSCORED),
        (recurses, UNSCORED),
        (lambda: ends(signal.SIGSEGV), UNSCORED),
        (lambda: float("text"), UNSCORED),
    ],
)
def test_a_call_has_a_verdict(call: Callable[[], Any], verdict: Verdict) -> None:
    assert scored(call, 5.0) == verdict


def test_processor_time_is_limited_also_inside_one_operation_of_python() -> None:
    assert scored(lambda: float(9**9**9 % 7), 1.0) == TOO_SLOW


def test_the_clock_is_limited_too() -> None:
    begin = time.monotonic()
    assert scored(lambda: time.sleep(60) or 1.0, 0.02, least_wall_s=0.2) == TOO_SLOW
    assert scored(leaves_a_process, 0.02, least_wall_s=0.2) == TOO_SLOW
    assert time.monotonic() - begin < 30


def test_what_ends_it_from_outside_is_no_fault_of_the_answer() -> None:
    with pytest.raises(RuntimeError, match="SIGTERM, which is not the call's doing"):
        scored(lambda: ends(signal.SIGTERM), 5.0)


def test_a_call_reaches_no_file_of_the_worker_and_changes_nothing_in_it() -> None:
    reading, writing = os.pipe()
    state = {"score": 0.0}

    def writes() -> float:
        state["score"] = 1.0
        try:
            os.write(writing, b"forged")
        except OSError:
            return 0.5
        return 1.0

    assert scored(writes, 5.0) == Verdict(0.5)
    os.close(writing)
    assert (os.read(reading, 9), state) == (b"", {"score": 0.0})
    os.close(reading)


def test_a_long_answer_comes_whole() -> None:
    assert in_a_fork(lambda: b"ab" * 300_000, 5.0) == Said(b"ab" * 300_000)


def test_a_call_leaves_the_worker_no_file_open_and_no_process() -> None:
    before, process = os.listdir("/proc/self/fd"), psutil.Process()
    children = process.children()
    for call in (lambda: 1.0, recurses, lambda: float("nan")):
        scored(call, 5.0)
    scored(leaves_a_process, 0.02, least_wall_s=0.2)
    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert process.children() == children, "one is running, or waits to be asked for its status"
