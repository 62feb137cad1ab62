"""Whose call is executed next. Pure.

Within a model calls are executed by their numbers, without a gap, whatever the order in which they arrive: a client sends
the chunks of a call together, the first one last. Between models turns go round. A turn ends with an optimizer step, after
MOST calls, or when the next number has not come: a model is put into the engine once for each turn.
"""

from __future__ import annotations

from collections import deque
from typing import Final

MOST: Final = 16
"""Calls of one turn."""


class Turns:
    """The calls that wait."""

    def __init__(self) -> None:
        self._next: dict[str, int] = {}
        """By model: the number that it executes next."""
        self._waiting: dict[str, set[int]] = {}
        self._round: deque[str] = deque()
        """Models whose next call is there, each once."""

    def begin(self, model: str, number: int) -> None:
        """Let a model's first call be this one."""
        self._next[model] = number
        self._waiting.setdefault(model, set())
        self._line_up(model)

    def add(self, model: str, number: int) -> None:
        """Take a call; one whose number was executed already is none. A model that did not begin begins with 0."""
        if model not in self._next:
            self.begin(model, 0)
        if number >= self._next[model]:
            self._waiting[model].add(number)
            self._line_up(model)

    def peek(self) -> str | None:
        """Return the model whose turn it is; None: no call can be executed."""
        return self._round[0] if self._round else None

    def take(self, model: str) -> int | None:
        """Take the model's next call; None: it is not there. The model must be the one whose turn it is."""
        number = self._next[model]
        if number not in self._waiting[model]:
            return None
        self._waiting[model].remove(number)
        self._next[model] = number + 1
        return number

    def end_turn(self) -> None:
        """Let the next model have its turn; this one lines up again if its next call is there."""
        self._line_up(self._round.popleft())

    def knows(self, model: str) -> bool:
        """Whether the model has begun."""
        return model in self._next

    def waiting(self, model: str) -> int:
        """The number of calls of a model that wait."""
        return len(self._waiting.get(model, ()))

    def _line_up(self, model: str) -> None:
        if self._next[model] in self._waiting[model] and model not in self._round:
            self._round.append(model)
