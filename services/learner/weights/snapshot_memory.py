"""The memory of snapshots, used again: to get it from the operating system for each version takes longer than to fill it."""

import weakref
from typing import Any

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class SnapshotMemory:
    """Keeps one snapshot's memory for the next one, once nobody reads it any more."""

    def __init__(self) -> None:
        self._spare: list[Bytes] = []

    def take(self, num_bytes: int) -> Bytes:
        """Return uint8 [num_bytes] with any content. It comes back by itself, when no array and no view of it is left."""
        memory = self._spare.pop() if self._spare else None
        if memory is None or memory.nbytes != num_bytes:
            memory = np.empty(num_bytes, dtype=np.uint8)
        # All views of what is returned refer to this array, and not to the memory itself.
        lent = memory[:]
        weakref.finalize(lent, self._give_back, memory).atexit = False
        return np.frombuffer(lent.data, dtype=np.uint8)

    def _give_back(self, memory: Bytes) -> None:
        self._spare[:] = [memory]
