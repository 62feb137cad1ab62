"""Tokens between engine and chunk: arrays of ids and log-probs, and runs of values that tokens share."""

from bisect import bisect_right
from collections.abc import Iterator
from typing import Any, Final, Generic, TypeVar

import numpy as np

TokenIds = np.ndarray[Any, np.dtype[np.int32]]
Logprobs = np.ndarray[Any, np.dtype[np.float32]]
T = TypeVar("T")

_FIRST_ROOM: Final = 256


class TokenArrays:
    """Append-only token ids and log-probs. Arrays read earlier do not change, and may be in transit."""

    def __init__(self) -> None:
        self._token_ids: TokenIds = np.empty(_FIRST_ROOM, np.int32)
        self._logprobs: Logprobs = np.empty(_FIRST_ROOM, np.float32)
        self._num_tokens = 0

    def __len__(self) -> int:
        return self._num_tokens

    @property
    def token_ids(self) -> TokenIds:
        """int32 [T], a read-only view."""
        return _view(self._token_ids, self._num_tokens)

    @property
    def logprobs(self) -> Logprobs:
        """float32 [T], a read-only view."""
        return _view(self._logprobs, self._num_tokens)

    def append(self, token_ids: TokenIds, logprobs: Logprobs) -> None:
        """Append one id and one log-prob per token."""
        begin, end = self._num_tokens, self._num_tokens + len(token_ids)
        if end > len(self._token_ids):
            # Double the size, so that each token is copied about once however many follow.
            room = max(end, 2 * begin)
            self._token_ids = _copied(self.token_ids, room)
            self._logprobs = _copied(self.logprobs, room)
        self._token_ids[begin:end] = token_ids
        self._logprobs[begin:end] = logprobs
        self._num_tokens = end


class Runs(Generic[T]):
    """A value for each of consecutive tokens, as runs of equal ones."""

    def __init__(self) -> None:
        self._values: list[T] = []
        self._ends: list[int] = []

    def __len__(self) -> int:
        """Return the number of runs."""
        return len(self._values)

    def __iter__(self) -> Iterator[tuple[T, int, int]]:
        """Yield each run's value, its first token, and the token after its last."""
        begin = 0
        for value, end in zip(self._values, self._ends, strict=True):
            yield value, begin, end
            begin = end

    def append(self, value: T, num_tokens: int) -> None:
        """Append ``num_tokens`` tokens with ``value``."""
        if not num_tokens:
            return
        end = num_tokens + (self._ends[-1] if self._ends else 0)
        if self._values and self._values[-1] == value:
            self._ends[-1] = end
        else:
            self._values.append(value)
            self._ends.append(end)

    def between(self, begin: int, end: int) -> list[tuple[T, int]]:
        """Return the runs of tokens ``begin`` to ``end``: each value with its number of tokens."""
        found: list[tuple[T, int]] = []
        place = bisect_right(self._ends, begin)
        while begin < end:
            run_end = min(self._ends[place], end)
            found.append((self._values[place], run_end - begin))
            begin, place = run_end, place + 1
        return found


def _view(array: np.ndarray[Any, Any], num_tokens: int) -> np.ndarray[Any, Any]:
    view = array[:num_tokens]
    view.flags.writeable = False
    return view


def _copied(array: np.ndarray[Any, Any], room: int) -> np.ndarray[Any, Any]:
    larger = np.empty(room, array.dtype)
    larger[: len(array)] = array
    return larger
