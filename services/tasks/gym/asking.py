"""Asks the process that draws tasks of reasoning-gym.

A process of its own, because

- the package takes seconds to import, and 200 MiB;
- some generators walk through sets of text, whose order differs between processes unless PYTHONHASHSEED says which it is;
- a generator may run code of its data, print, or not come to an end.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import IO, Any, Final

import msgspec

from gspo_services.shared.runtime.errors import PassingFault
from gspo_services.shared.runtime.lifecycle import module_command

START_S: Final = 120.0
"""Until the first answer: the package is imported, on a machine that may be busy."""
ANSWER_S: Final = 30.0
"""For every other answer. Nearly all take milliseconds."""
END_S: Final = 5.0


class Generator(msgspec.Struct, frozen=True, kw_only=True):
    """A generator with the parameters that a configuration fixes."""

    name: str
    parameters: dict[str, Any] = {}


class GymRefused(ValueError):
    """The generator or its parameters are wrong, the package is missing, or a task cannot be drawn: the text says which."""


class GymUndrawn(GymRefused, PassingFault):
    """The process has ended or taken too long. Another machine, or this one at another time, may draw the same task."""


class Library:
    """The process, which is started when it is first asked, and again after it was killed."""

    def __init__(self, *, start_s: float = START_S, answer_s: float = ANSWER_S) -> None:
        self._start_s = start_s
        self._answer_s = answer_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[[subprocess.Popen[bytes]], Library] | None = None

    def version(self) -> str:
        """Of the package. Raises: GymRefused when it is not installed."""
        return str(self._ask({"do": "version"}))

    def names(self) -> list[str]:
        """All generators, in the order of their names. Raises: GymRefused."""
        return [str(name) for name in self._ask({"do": "names"})]

    def levels(self, generator: Generator) -> list[int]:
        """Levels of its curriculum that it accepts; none without a curriculum, or if its parameters fix all of it.

        Raises: GymRefused for a generator that there is not, and for parameters that it refuses at any of its levels.
        """
        return [int(level) for level in self._ask({"do": "levels", "generator": generator})]

    def draw(self, generator: Generator, level: int | None, number: int) -> Mapping[str, Any]:
        """The generator's task ``number``, from 0 to 2**31 - 1: {"question", "answer", "entry"}, all text.

        ``level`` None: the generator's own defaults. Raises: GymRefused; of it GymUndrawn where another machine may draw it.
        """
        found: Mapping[str, Any] = self._ask({"do": "draw", "generator": generator, "level": level, "number": number})
        return found

    def close(self) -> None:
        """End the process; the next question starts another."""
        with self._lock:
            self._kill()

    def _ask(self, request: Mapping[str, Any]) -> Any:
        """The answer to one request. Raises: GymRefused."""
        with self._lock:
            patience_s = self._answer_s
            if self._process is None:
                patience_s += self._start_s
                self._process = _start()
                self._end = weakref.finalize(self, _end, self._process)
            asked = msgspec.json.encode(request)
            line = _answered(self._process, asked + b"\n", patience_s)
            if not line:
                status = None if line is None else self._process.wait(END_S)
                self._kill()
                why = "took too long" if status in (None, -signal.SIGPROF) else f"ended with status {status}"
                raise GymUndrawn(f"the process that draws tasks of reasoning-gym {why}: {asked.decode()[:300]}")
        answer = json.loads(line)
        if "refused" in answer:
            raise GymRefused(answer["refused"])
        return answer["answer"]

    def _kill(self) -> None:
        if self._end is not None:
            self._end()
        self._process = self._end = None


@cache
def gym_library() -> Library:
    """The one of this process."""
    return Library()


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        module_command("gspo_services.tasks.gym.worker"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONHASHSEED": "0"},
        # A signal for the terminal's processes is for its parent to hear, which closes its input.
        start_new_session=True,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(BrokenPipeError):
            pipe.close()
    process.wait(END_S)


def _answered(process: subprocess.Popen[bytes], request: bytes, patience_s: float) -> bytes | None:
    """The line that it answers; empty when it ends, None when it takes too long."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(request)
        process.stdin.flush()
    except BrokenPipeError:
        return b""
    return _line(process.stdout, patience_s)


def _line(stream: IO[bytes], patience_s: float) -> bytes | None:
    """The next line, which is all that the stream has; empty at its end, None when that takes too long."""
    pieces: list[bytes] = []
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while not (pieces and pieces[-1].endswith(b"\n")):
            if not selector.select(patience_s):
                return None
            piece = os.read(stream.fileno(), 2**20)
            if not piece:
                return b""
            pieces.append(piece)
    return b"".join(pieces)
