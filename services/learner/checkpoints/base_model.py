"""The model that adapters belong to: a checkpoint of adapters names it by a digest of all its weights.

So it is found to be another one whatever directory and files it is read from.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import xxhash
from torch import Tensor

from gspo_services.learner.checkpoints.state_copy import state_digest


class BaseDigest:
    """The digest of a model's weights, which come one after the other, in any order."""

    def __init__(self) -> None:
        self._found: list[tuple[str, str, tuple[int, ...], str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one weight under its serving name."""
        data = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data
        self._found.append((name, str(tensor.dtype), tuple(tensor.shape), xxhash.xxh3_128_hexdigest(data)))

    def add_all(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take all of them; see ``gspo.model.serving.serving_weights``."""
        for name, tensor in weights:
            self.add(name, tensor)

    def digest(self) -> bytes:
        """32 bytes."""
        return state_digest(self._found)
