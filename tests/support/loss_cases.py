"""Builders of loss inputs: random sequences and the flat tensors that the loss takes, packed or padded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gspo.loss import LossOutput, gspo_loss
from gspo.reference import ReferenceSequence
from gspo.settings import RatioUnit
from gspo.staleness import clip_band

EPS_LOW, EPS_HIGH = 3e-4, 4e-4


@dataclass(frozen=True)
class Flat:
    """Flat tensors of some sequences; `logprobs_T` is a leaf that collects the gradient."""

    logprobs_T: Tensor
    anchor_T: Tensor
    advantages_T: Tensor
    mask_T: Tensor
    sequence_ids_T: Tensor
    turn_ids_T: Tensor
    lag_S: Tensor
    weights_S: Tensor

    def loss(
        self,
        num_sequences: int,
        *,
        ratio_unit: RatioUnit = "sequence",
        eps_low: float = EPS_LOW,
        eps_high: float = EPS_HIGH,
        band_growth: float = 0.0,
        noise: float = 0.0,
        log_ratio_clamp: float = 10.0,
    ) -> LossOutput:
        band = clip_band(self.lag_S, eps_low=eps_low, eps_high=eps_high, band_growth=band_growth, noise_z=1.0, sigma=noise)
        return gspo_loss(
            self.logprobs_T,
            self.anchor_T,
            self.advantages_T,
            self.mask_T,
            self.sequence_ids_T,
            self.turn_ids_T,
            num_sequences=num_sequences,
            band=band,
            ratio_unit=ratio_unit,
            mismatch_weights_S=self.weights_S,
            log_ratio_clamp=log_ratio_clamp,
        )

    def gradient(self, output: LossOutput) -> Tensor:
        (gradient_T,) = torch.autograd.grad(output.loss, self.logprobs_T)
        return gradient_T


def one_sequence(
    delta: Sequence[float],
    advantage: float | Sequence[float],
    *,
    turns: Sequence[int] | None = None,
    lag: float = 0.0,
    weight: float = 1.0,
    anchor: float = 0.0,
) -> ReferenceSequence:
    """A sequence of action tokens only, `delta` above its anchor (0 keeps the deltas exact in float32)."""
    advantages = [advantage] * len(delta) if isinstance(advantage, float | int) else list(advantage)
    return ReferenceSequence(
        logprobs=[anchor + d for d in delta],
        anchor_logprobs=[anchor] * len(delta),
        advantages=advantages,
        mask=[True] * len(delta),
        turns=[0] * len(delta) if turns is None else turns,
        lag=lag,
        weight=weight,
    )


def random_sequence(
    generator: torch.Generator,
    mask: Sequence[bool],
    *,
    scale: float = 1e-3,
    lag: float = 0.0,
    weight: float = 1.0,
    per_token_advantages: bool = True,
    dtype: torch.dtype = torch.float32,
) -> ReferenceSequence:
    """Log-probs around -1.5, deltas of deviation `scale` per token with a common drift, turns of about four tokens."""
    length = len(mask)
    anchor = -3 * torch.rand(length, generator=generator, dtype=dtype)
    drift = scale * torch.randn(1, generator=generator, dtype=dtype)
    logprobs = anchor + drift + scale * torch.randn(length, generator=generator, dtype=dtype)
    advantages = torch.randn(length if per_token_advantages else 1, generator=generator, dtype=dtype).expand(length)
    turns = (torch.rand(length, generator=generator) < 0.25).long().cumsum(0)
    return ReferenceSequence(
        logprobs=logprobs.tolist(),
        anchor_logprobs=anchor.tolist(),
        advantages=advantages.tolist(),
        mask=mask,
        turns=turns.tolist(),
        lag=lag,
        weight=weight,
    )


def pack(sequences: Sequence[ReferenceSequence], dtype: torch.dtype = torch.float32) -> Flat:
    """Lay sequences end to end."""
    return _flat(sequences, [len(sequence.mask) for sequence in sequences], dtype)


def pad(sequences: Sequence[ReferenceSequence], dtype: torch.dtype = torch.float32) -> Flat:
    """Reshape a padded [S, L] layout; what stands in the padding must not matter: NaN and impossible ids."""
    longest = max(len(sequence.mask) for sequence in sequences) + 3
    return _flat(sequences, [longest] * len(sequences), dtype)


def _flat(sequences: Sequence[ReferenceSequence], lengths: Sequence[int], dtype: torch.dtype) -> Flat:
    def column(rows: Sequence[Sequence[float]], fill: float) -> list[float]:
        return [x for row, length in zip(rows, lengths, strict=True) for x in [*row, *[fill] * (length - len(row))]]

    nan = float("nan")
    ids = [[i] * len(sequence.mask) for i, sequence in enumerate(sequences)]
    logprobs_T = torch.tensor(column([s.logprobs for s in sequences], nan), dtype=dtype)
    return Flat(
        logprobs_T=logprobs_T.requires_grad_(),
        anchor_T=torch.tensor(column([s.anchor_logprobs for s in sequences], nan), dtype=dtype),
        advantages_T=torch.tensor(column([s.advantages for s in sequences], nan), dtype=dtype),
        mask_T=torch.tensor(column([s.mask for s in sequences], False), dtype=torch.bool),
        sequence_ids_T=torch.tensor(column(ids, -7), dtype=torch.int64),
        turn_ids_T=torch.tensor(column([s.turns for s in sequences], -1), dtype=torch.int64),
        lag_S=torch.tensor([s.lag for s in sequences], dtype=dtype),
        weights_S=torch.tensor([s.weight for s in sequences], dtype=dtype),
    )
