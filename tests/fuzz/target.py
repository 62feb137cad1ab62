"""A fuzz target, and how one case of it runs: only documented errors, in bounded time and memory."""

import resource
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final

MAX_CASE_S: Final = 1.0
"""Processor time that one case may take. A busy machine does not change it."""
MAX_CASE_BYTES: Final = 64 * 1024 * 1024
"""Memory that one case may add: a small input must not cost much memory."""


class Violation(AssertionError):
    """A boundary broke one of its rules. The text says which."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """One boundary. ``run`` takes any bytes and raises for a violation. An undocumented error is one, too.

    ``seeds`` returns valid inputs to start with; ``mutate`` makes a structured change to one. ``cases`` is the target's
    part of ten million cases: many for a fast decoder, few for a slow loader.
    """

    name: str
    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    mutate: Callable[[bytes, Random], bytes]
    cases: int
    max_bytes: int = 4096


@dataclass
class Measured:
    """Time and memory that the cases of a target took so far, and the limits of one case."""

    max_case_s: float = MAX_CASE_S
    max_case_bytes: int = MAX_CASE_BYTES
    cases: int = 0
    slowest_s: float = 0.0
    slowest: bytes = b""
    largest_bytes: int = 0

    def run(self, target: Target, data: bytes) -> None:
        """Run one case. Raises: Violation when it takes too much time or memory; any error that ``target`` raises."""
        tracing = tracemalloc.is_tracing()
        before_bytes = _start_of_memory(tracing)
        before_s = time.process_time()
        try:
            target.run(data)
        finally:
            took_s = time.process_time() - before_s
            num_bytes = _memory(tracing) - before_bytes
            self.cases += 1
            if took_s > self.slowest_s:
                self.slowest_s, self.slowest = took_s, data
            self.largest_bytes = max(self.largest_bytes, num_bytes)
        if took_s > self.max_case_s:
            raise Violation(f"{target.name}: {len(data)} bytes took {took_s:.2f} s, {self.max_case_s} allowed")
        if num_bytes > self.max_case_bytes:
            raise Violation(
                f"{target.name}: {len(data)} bytes took {num_bytes} bytes of memory, {self.max_case_bytes} allowed"
            )


def _start_of_memory(tracing: bool) -> int:
    if not tracing:
        return _memory(tracing)
    tracemalloc.reset_peak()
    return tracemalloc.get_traced_memory()[0]


def _memory(tracing: bool) -> int:
    """Peak memory so far: of Python's allocations while they are traced, else of the whole process."""
    if tracing:
        return tracemalloc.get_traced_memory()[1]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def require(condition: bool, text: str) -> None:
    """Raises: Violation when ``condition`` is false."""
    if not condition:
        raise Violation(text)
