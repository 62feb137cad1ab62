"""Random padded batches in TRL's layout and in the layout of this project's loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PaddedBatch:
    """[S, L] tensors; ``inside_SL`` is False in the padding, ``action_SL`` and at tool output."""

    logprobs_SL: Tensor
    anchor_SL: Tensor
    inside_SL: Tensor
    action_SL: Tensor
    advantages_S: Tensor

    @property
    def mask_T(self) -> Tensor:
        return (self.inside_SL & self.action_SL).reshape(-1)

    @property
    def sequence_ids_T(self) -> Tensor:
        num_sequences, length = self.logprobs_SL.shape
        return torch.arange(num_sequences).repeat_interleave(length)

    @property
    def advantages_T(self) -> Tensor:
        return self.advantages_S[self.sequence_ids_T]


def random_batch(seed: int, *, spread: float, dtype: torch.dtype) -> PaddedBatch:
    """Draw 1 to 12 sequences of up to 40 tokens, some fully masked; log-ratios have deviation ``spread`` per token."""
    generator = torch.Generator().manual_seed(seed)
    num_sequences = int(torch.randint(1, 13, (), generator=generator))
    length = int(torch.randint(1, 41, (), generator=generator))
    shape = (num_sequences, length)
    lengths_S = torch.randint(0, length + 1, (num_sequences,), generator=generator)
    anchor_SL = -3 * torch.rand(shape, generator=generator, dtype=dtype)
    drift_S = spread * torch.randn((num_sequences, 1), generator=generator, dtype=dtype)
    noise_SL = spread * torch.randn(shape, generator=generator, dtype=dtype)
    return PaddedBatch(
        logprobs_SL=anchor_SL + drift_S + noise_SL,
        anchor_SL=anchor_SL,
        inside_SL=torch.arange(length) < lengths_S[:, None],
        action_SL=torch.rand(shape, generator=generator) < 0.8,
        advantages_S=torch.randn(num_sequences, generator=generator, dtype=dtype),
    )
