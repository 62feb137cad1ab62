"""Asks the process that draws tasks of reasoning-gym.

A process of its own, because

- the package takes seconds to import, and 200 MiB;
- some generators walk through sets of text, whose order differs between processes unless PYTHONHASHSEED says which it is;
- a generator may run code of its data, print, or not come to an end.
"""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

import msgspec

from gspo_services.shared.runtime.errors import PassingFault
from gspo_services.shared.runtime.lifecycle import module_command
from gspo_services.tasks.supervised import BadMessage, BlockingProcess

START_S: Final = 120.0
"""Until the first answer: the package is imported, on a machine that may be busy."""
ANSWER_S: Final = 30.0
"""For every other answer. Nearly all take milliseconds."""
END_S: Final = 5.0
_WHO: Final = "the process that draws tasks of reasoning-gym"


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
        self._process: BlockingProcess | None = None
        self._end: weakref.finalize[[], Library] | None = None

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
                self._process = BlockingProcess(
                    module_command("gspo_services.tasks.gym.worker"), {**os.environ, "PYTHONHASHSEED": "0"}
                )
                self._end = weakref.finalize(self, self._process.close)
            asked = msgspec.json.encode(request)
            try:
                self._process.send(asked, patience_s)
                answer = msgspec.json.decode(self._process.receive(patience_s))
            except BadMessage as error:
                self._kill()
                raise GymRefused(f"{_WHO} answers with {error}: {asked.decode()[:300]}") from error
            except (TimeoutError, ConnectionError) as error:
                status = None if isinstance(error, TimeoutError) else self._process.status(END_S)
                self._kill()
                why = "took too long" if status in (None, -signal.SIGPROF) else f"ended with status {status}"
                raise GymUndrawn(f"{_WHO} {why}: {asked.decode()[:300]}") from error
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
