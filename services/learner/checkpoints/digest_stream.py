"""Digests weights that arrive one by one: hashes them on all cores while the next are gathered, and keeps none."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import torch
from torch import Tensor

from gspo_protocol.digests import bytes_digest
from gspo_services.learner.checkpoints.state_copy import state_digest

BUDGET_BYTES: Final = 512 * 2**20
"""Weights that wait to be hashed. A larger tensor waits alone."""


def streamed_digest(weights: Iterable[tuple[str, Tensor]], *, budget_bytes: int = BUDGET_BYTES) -> bytes:
    """32 bytes: the digest of (name in the serving layout, tensor on any device) of all tensors, in any order.

    Exhausts ``weights``, whose tensors need to be valid only until the next one. At most ``budget_bytes`` are held.
    """
    found: list[tuple[str, str, tuple[int, ...], str]] = []
    waiting: deque[tuple[str, str, tuple[int, ...], int, Future[str]]] = deque()
    held = 0

    def take() -> int:
        name, dtype, shape, num_bytes, digest = waiting.popleft()
        found.append((name, dtype, shape, digest.result()))
        return num_bytes

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for name, tensor in weights:
            while waiting and held + tensor.nbytes > budget_bytes:
                held -= take()
            # A copy: the tensor may be a buffer that is filled again for the next one.
            own = tensor.detach().contiguous().to("cpu", copy=True).reshape(-1).view(torch.uint8).numpy()
            digest = pool.submit(bytes_digest, own.data)
            waiting.append((name, str(tensor.dtype), tuple(tensor.shape), tensor.nbytes, digest))
            held += tensor.nbytes
        while waiting:
            take()
    return state_digest(found)
