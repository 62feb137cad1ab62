"""Finds stop strings in the rollout instead of the engine.

The engine gets no stop strings: it would cut text, and the learner needs to know which tokens were sampled. So the rollout
reads the tokens as they come. At the token with which a stop string is complete it ends the request; that token and those
before it are the turn, later ones that were under way are dropped. The client's text ends before the stop string. The turn
has no stop token, so the bridge to the next turn closes it, as it closes one that was cut by its length.
"""

from collections.abc import Sequence
from dataclasses import replace

from gspo_services.rollout.rendering.interface import Parsed, RenderingError


class StopStrings:
    """Looks for the first of several strings in text that comes in pieces."""

    def __init__(self, strings: Sequence[str]) -> None:
        """Raises: RenderingError for an empty string, which would stop before the first token."""
        if not all(isinstance(string, str) and string for string in strings):
            raise RenderingError("stop: every stop string must have at least one character")
        self.strings = tuple(strings)
        self._keep = max((len(string) for string in strings), default=1) - 1
        self._tail = ""
        self._num_before = 0

    def feed(self, text: str) -> int | None:
        """Return where the first stop string begins, counted from the beginning of all text; None while none is complete."""
        self._tail += text
        found = [at for string in self.strings if (at := self._tail.find(string)) >= 0]
        if found:
            return self._num_before + min(found)
        surplus = max(0, len(self._tail) - self._keep)
        self._num_before += surplus
        self._tail = self._tail[surplus:]
        return None


def num_held(text: str, markers: Sequence[str]) -> int:
    """Count the characters at the end of ``text`` that may begin a marker."""
    longest = 0
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:length]):
                longest = length
                break
    return longest


def without_stop(parsed: Parsed, strings: Sequence[str]) -> Parsed:
    """Cut ``parsed`` before the first stop string, as the client receives it."""
    reasoning = None if parsed.reasoning is None else _before(parsed.reasoning, strings)
    return replace(parsed, reasoning=reasoning, content=_before(parsed.content, strings))


def _before(text: str, strings: Sequence[str]) -> str:
    return text[: min([len(text), *(at for string in strings if (at := text.find(string)) >= 0)])]
