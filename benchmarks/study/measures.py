"""Measurements of one batch that do not depend on its split; pure functions of tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gspo.diagnostics import SequenceStats, effective_sample_size

QUANTILES = (("p01", 0.01), ("p50", 0.5), ("p99", 0.99))


@dataclass
class GradientNoise:
    """Agreement of the gradients of the two halves of each mini-batch.

    With g1, g2 the gradients of the means over n sequences each:  g1 . g2  estimates |G|^2 without bias and
    n |g1 - g2|^2 / 2  the trace of the covariance of one sequence's gradient. Their quotient, in sequences, is the simple
    noise scale (arXiv 1812.06162): the batch size at which noise equals signal. It keeps sums, so that a ratio of
    means can be taken later: a mean of ratios has no expectation where |G|^2 is near 0.
    """

    signal: list[float] = field(default_factory=list)
    trace: list[float] = field(default_factory=list)
    cosine: list[float] = field(default_factory=list)

    def add(self, first: Tensor, second: Tensor, *, num_sequences: int) -> None:
        """Add ``first`` and ``second``, gradients of the means over ``num_sequences`` sequences each."""
        product = float(first @ second)
        lengths = float(first.norm()) * float(second.norm())
        self.signal.append(product)
        self.trace.append(num_sequences * float((first - second).square().sum()) / 2)
        self.cosine.append(product / lengths if lengths > 0 else 0.0)

    def record(self) -> dict[str, float]:
        """Return the first mini-batch, where ratios are 1 at lag 0, and the later ones, where objectives differ."""
        record = {}
        for name, part in (("first", slice(0, 1)), ("later", slice(1, None))):
            if self.signal[part]:
                for quantity, values in (("signal", self.signal), ("trace", self.trace), ("cosine", self.cosine)):
                    record[f"grad_{quantity}_{name}"] = sum(values[part]) / len(values[part])
        return record


def ratio_record(log_ratio_T: Tensor, name: str) -> dict[str, float]:
    """Return deviation and quantiles of log-ratios, in nats."""
    if log_ratio_T.numel() < 2:
        return {}
    values = log_ratio_T.double()
    record = {f"{name}_std": float(values.std()), f"{name}_abs": float(values.abs().mean())}
    for label, quantile in QUANTILES:
        record[f"{name}_{label}"] = float(torch.quantile(values, quantile))
    return record


def loss_record(stats: SequenceStats) -> dict[str, float]:
    """Return clipping, effective sample size, entropy and lag; means over the sequences of the batch."""
    high, low = float(stats.clipped_high_S.mean()), float(stats.clipped_low_S.mean())
    return {
        "clip": high + low,
        "clip_high": high,
        "clip_low": low,
        "ess": effective_sample_size(stats.log_ratio_S.exp() * stats.weight_S),
        "weight": float(stats.weight_S.mean()),
        "entropy": float(stats.entropy_S.mean()),
        "lag": float(stats.lag_S.mean()),
        "length": float(stats.num_tokens_S.mean()),
        "zero_advantage": float(stats.zero_advantage_S.mean()),
        "clamped_tokens": float(stats.clamped_tokens_S.sum()),
    }


def lag_record(stats: SequenceStats) -> dict[str, float]:
    """Return the clipped share and the mean width of the clip range (nats) for each whole lag of the batch."""
    record = {}
    clipped_S, width_S = stats.clipped_high_S + stats.clipped_low_S, stats.clip_high_S - stats.clip_low_S
    for lag in stats.lag_S.round().unique().tolist():
        chosen = stats.lag_S.round() == lag
        record[f"clip_lag_{lag:.0f}"] = float(clipped_S[chosen].mean())
        if bool(torch.isfinite(width_S).all()):
            record[f"width_lag_{lag:.0f}"] = float(width_S[chosen].mean())
    return record


def flat_gradient(parameters: list[torch.nn.Parameter]) -> Tensor:
    """Return a copy of all gradients end to end; zeros where a parameter has none."""
    return torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten().clone() for p in parameters])
