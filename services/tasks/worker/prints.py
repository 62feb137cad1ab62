"""What the user's code prints: lines under the number of the episode that printed them, and no more than a budget."""

import io
import threading
from collections.abc import Callable
from contextvars import ContextVar

current_episode: "ContextVar[int | None]" = ContextVar("current_episode", default=None)
"""The episode that this task or thread works for: what a task starts works for the same one."""
MAX_LINE_CHARS = 2000


class EpisodePrints(io.TextIOBase):
    """Standard output of the worker. A flood costs the episode that prints it what it has to say, and nobody else."""

    def __init__(self, descriptor: int, say: "Callable[[int | None, str], None]", budget_chars: int) -> None:
        self._descriptor = descriptor
        self._say = say
        self._budget_chars = budget_chars
        self._lock = threading.RLock()
        self._unfinished: dict[int | None, str] = {}
        self._left: dict[int | None, int] = {}

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    @property
    def errors(self) -> str:  # type: ignore[override]
        return "replace"

    def fileno(self) -> int:
        return self._descriptor

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        """Keep ``text`` until its line is complete, as far as the episode's budget goes."""
        episode = current_episode.get()
        with self._lock:
            left = self._left.get(episode, self._budget_chars)
            if left <= 0:
                return len(text)
            self._left[episode] = left - len(text)
            taken = text[:left]
            waiting = self._unfinished.pop(episode, "") + taken
            *lines, rest = waiting.split("\n")
            if rest and (len(rest) > MAX_LINE_CHARS or len(taken) < len(text)):
                lines, rest = [*lines, rest], ""
            if rest:
                self._unfinished[episode] = rest
            if len(taken) < len(text):
                lines.append(f"(more than {self._budget_chars} characters: the rest is left out)")
        if lines:
            self._say(episode, "\n".join(lines))
        return len(text)

    def end(self, episode: int) -> None:
        """Say what is left of an episode and forget it."""
        with self._lock:
            rest = self._unfinished.pop(episode, "")
            self._left.pop(episode, None)
        if rest:
            self._say(episode, rest)
