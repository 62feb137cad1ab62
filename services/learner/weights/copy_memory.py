"""Memory for copies of the weights, used again: to get as much from the operating system takes longer than to fill it."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class CopyMemory:
    """Keeps the memory of copies that nobody reads any more, up to that of one version."""

    def __init__(self) -> None:
        self._spare: dict[tuple[int, bool], list[Tensor]] = {}
        self._spare_bytes = 0
        self._most_bytes = 0
        self._lock = threading.Lock()

    def take(self, num_bytes: int, *, pinned: bool) -> tuple[Tensor, Bytes]:
        """Return uint8 [num_bytes] with any content, to be filled, and as it is read. It comes back by itself when no view
        of the array is left, also none that a message on its way holds.
        """
        with self._lock:
            found = self._spare.get((num_bytes, pinned))
            memory = found.pop() if found else None
            self._spare_bytes -= num_bytes if memory is not None else 0
        if memory is None:
            memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        # All views of what is returned refer to this array, and not to the memory itself.
        lent = memory.numpy()[:]
        weakref.finalize(lent, self._give_back, memory, pinned).atexit = False
        return memory, np.frombuffer(lent.data, dtype=np.uint8)

    def keep_for(self, num_bytes: int) -> None:
        """``num_bytes``: of a version, as much as is kept."""
        with self._lock:
            self._most_bytes = num_bytes

    def _give_back(self, memory: Tensor, pinned: bool) -> None:
        num_bytes = memory.numel()
        with self._lock:
            if self._spare_bytes + num_bytes <= self._most_bytes:
                self._spare.setdefault((num_bytes, pinned), []).append(memory)
                self._spare_bytes += num_bytes
