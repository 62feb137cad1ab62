"""Counts the bytes of the tensors that exist, and of what ranks send each other."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BLOCK_BYTES: Final = 512
"""PyTorch's allocator for CUDA rounds each request up to it."""


class Held(TorchDispatchMode):
    """Inside, every tensor counts from the operation that makes it until the last one that has its storage is gone.

    Values are not there: where code reads one, it gets 0 or false, and all are close to each other. What kernels allocate
    within themselves is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        """Bytes."""
        self.peak = 0
        self.sent: Counter[str] = Counter()
        """Bytes of the largest tensor of each collective, by kind: the whole of what ranks gather or reduce."""
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return _zero(args[0].dtype)
        if func is torch.ops.aten.allclose.default:
            return True
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            name = func.name().partition("::")[2]
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            self.sent[name] += max((tensor.numel() * tensor.element_size() for tensor in tensors), default=0)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                self._see(leaf.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        known = self._known.get(key)
        if known is not None and known() is storage:
            return
        size = -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
        self._known[key] = weakref.ref(storage, partial(self._forget, key, size))
        self.now += size
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int, size: int, _: Any) -> None:
        self.now -= size
        self._known.pop(key, None)


def _zero(dtype: torch.dtype) -> bool | float | int:
    return False if dtype == torch.bool else 0.0 if dtype.is_floating_point else 0
