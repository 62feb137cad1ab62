"""The mismatch between learner and engine: weights of sequences, KL, and the running deviation of a token, sigma."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from gspo.inputs.units import segment_mean, segment_sum
from gspo.inputs.validation import (
    require_finite,
    require_ids,
    require_mask,
    require_precise,
    require_vector,
)
from gspo.settings import TisMode, require_number

MAX_LOG_WEIGHT = 10.0
"""A log-weight beyond this means another model; the bound keeps weights finite whatever the engine reported."""


@dataclass(frozen=True)
class MismatchWeights:
    """One factor per sequence for its advantages; a rejected sequence has weight 0 and still counts in n and N."""

    weights_S: Tensor
    rejected_S: Tensor
    weights_T: Tensor | None = None
    """One factor per token instead, 1 off the mask; ``weights_S`` is then their mean over each sequence."""


def mismatch_weights(
    proximal_logprobs_T: Tensor,
    behaviour_logprobs_T: Tensor,
    mask_T: Tensor,
    sequence_ids_T: Tensor,
    num_sequences: int,
    *,
    mode: TisMode,
    cap: float,
    floor: float = 0.5,
) -> MismatchWeights:
    """Return exp(mean(log pi_prox - log mu)) per sequence: min(., cap) for "truncate", 0 outside [1/cap, cap] for "reject".

    "truncate_tokens": min(pi_prox / mu, cap) per token (V-trace's truncated weights, IMPALA, arXiv 1802.01561).
    "reject_tokens": pi_prox / mu per token, 0 outside [floor, cap] (IcePop, arXiv 2510.18855).
    "truncate_product": min(prod pi_prox / mu, cap) per sequence, the importance weight of the whole sequence.

    Decoupled PPO (arXiv 2110.00641) leaves this factor outside the clip. It is length-normalised like GSPO's ratio: one cap
    serves every length, but the weight is no longer that of the whole sequence. Truncation: Ionides,
    "Truncated Importance Sampling" (2008).
    Log-probs are read at action tokens only; the weights carry no gradient. A sequence without action tokens has
    weight 1. Raises: ValueError for non-finite or half-precision log-probs and for ids out of range.
    """
    require_number("cap", cap, low=1.0, low_open=True)
    delta_T, ids_T = _mismatch(proximal_logprobs_T, behaviour_logprobs_T, mask_T, sequence_ids_T, num_sequences)
    log_weight_S = segment_mean(delta_T, mask_T, ids_T, num_sequences).clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)
    rejected_S = torch.zeros_like(log_weight_S, dtype=torch.bool)
    if mode == "off":
        return MismatchWeights(torch.ones_like(log_weight_S), rejected_S)
    if mode == "truncate":
        return MismatchWeights(log_weight_S.exp().clamp(max=cap), rejected_S)
    if mode in ("truncate_tokens", "reject_tokens"):
        weights_T = delta_T.clamp(max=math.log(cap), min=-MAX_LOG_WEIGHT).exp()
        if mode == "reject_tokens":
            require_number("floor", floor, low=0.0, high=1.0, low_open=True)
            weights_T = torch.where((delta_T < math.log(floor)) | (delta_T > math.log(cap)), 0.0, weights_T)
        weights_S = segment_mean(weights_T, mask_T, ids_T, num_sequences)
        empty_S = segment_sum(mask_T.to(weights_T.dtype), ids_T, num_sequences) == 0
        return MismatchWeights(torch.where(empty_S, 1.0, weights_S), rejected_S, weights_T)
    if mode == "truncate_product":
        log_weight_S = segment_sum(delta_T, ids_T, num_sequences).clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)
        return MismatchWeights(log_weight_S.exp().clamp(max=cap), rejected_S)
    if mode != "reject":
        raise ValueError(f"mode is {mode!r}; choose one of {', '.join(get_args(TisMode))}")
    rejected_S = log_weight_S.abs() > math.log(cap)
    return MismatchWeights(torch.where(rejected_S, 0.0, log_weight_S.exp()), rejected_S)


@dataclass(frozen=True)
class SequenceMismatch:
    """Learner against engine per sequence, without gradient; 0 for a sequence without action tokens."""

    mean_S: Tensor
    """Mean of log pi - log mu, nats."""
    token_variance_S: Tensor
    """Variance of log pi - log mu about the mean (divided by n - 1), nats squared; 0 for one token."""
    kl_S: Tensor
    """``mismatch_kl``: KL(mu || pi), nats per token."""


def sequence_mismatch(
    learner_logprobs_T: Tensor,
    behaviour_logprobs_T: Tensor,
    mask_T: Tensor,
    sequence_ids_T: Tensor,
    num_sequences: int,
) -> SequenceMismatch:
    """Measure what ``gspo.calibration`` learns from. Valid while the learner holds the weights of the batch's start."""
    delta_T, ids_T = _mismatch(learner_logprobs_T, behaviour_logprobs_T, mask_T, sequence_ids_T, num_sequences)
    # In float64: sums and squares of large float32 log-ratios are infinite, which no calibration takes.
    exact_T = delta_T.double()
    mean_S = segment_mean(exact_T, mask_T, ids_T, num_sequences)
    square_T = torch.where(mask_T, (exact_T - mean_S[ids_T]).square(), 0.0)
    freedom_S = (segment_sum(mask_T.double(), ids_T, num_sequences) - 1).clamp(min=1)
    variance_S = segment_sum(square_T, ids_T, num_sequences) / freedom_S
    return SequenceMismatch(mean_S, variance_S, _kl(delta_T, mask_T, ids_T, num_sequences))


def mismatch_kl(
    learner_logprobs_T: Tensor,
    behaviour_logprobs_T: Tensor,
    mask_T: Tensor,
    sequence_ids_T: Tensor,
    num_sequences: int,
) -> Tensor:
    """Estimate KL(mu || pi) per sequence, in nats per token: mean of r - 1 - log r with r = pi / mu, tokens from mu.

    The estimator ("k3", Schulman, http://joschu.net/blog/kl-approx.html) is unbiased and never negative.
    """
    delta_T, ids_T = _mismatch(learner_logprobs_T, behaviour_logprobs_T, mask_T, sequence_ids_T, num_sequences)
    return _kl(delta_T, mask_T, ids_T, num_sequences)


def _kl(delta_T: Tensor, mask_T: Tensor, ids_T: Tensor, num_sequences: int) -> Tensor:
    delta_T = delta_T.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)
    return segment_mean(torch.expm1(delta_T) - delta_T, mask_T, ids_T, num_sequences)


def _mismatch(
    learner_T: Tensor, behaviour_T: Tensor, mask_T: Tensor, sequence_ids_T: Tensor, num_sequences: int
) -> tuple[Tensor, Tensor]:
    """Return learner minus engine log-probs (0 off the mask), without gradient, and ids that are safe to index."""
    length = mask_T.shape[0]
    require_mask("mask_T", mask_T)
    for name, values in (("learner log-probs", learner_T), ("behaviour_logprobs_T", behaviour_T)):
        require_vector(name, values, length)
        require_precise(name, values)
        require_finite(name, values, mask_T)
    require_vector("sequence_ids_T", sequence_ids_T, length)
    require_ids("sequence_ids_T", sequence_ids_T, num_sequences, mask_T)
    delta_T = torch.where(mask_T, learner_T.detach() - behaviour_T.detach(), learner_T.new_zeros(()))
    return delta_T, torch.where(mask_T, sequence_ids_T, 0)


@dataclass(frozen=True)
class MismatchMoments:
    """Count, sum and sum of squares of per-token mismatch; they add up over micro-batches, and over ranks as a vector."""

    count: float
    total: float
    total_of_squares: float

    def __add__(self, other: MismatchMoments) -> MismatchMoments:
        return MismatchMoments(
            self.count + other.count, self.total + other.total, self.total_of_squares + other.total_of_squares
        )

    def as_tensor(self) -> Tensor:
        """Return the three moments as float64 [3]; their sum over ranks (all-reduce) gives the moments of the batch."""
        return torch.tensor([self.count, self.total, self.total_of_squares], dtype=torch.float64)

    @classmethod
    def from_tensor(cls, moments: Tensor) -> MismatchMoments:
        """Build moments from what ``as_tensor`` gives, or from a sum of several: float64 [3]."""
        count, total, total_of_squares = moments.tolist()
        return cls(count, total, total_of_squares)

    @property
    def variance(self) -> float:
        """Variance about the mean (divided by the count), in nats squared; 0 for no tokens."""
        if self.count == 0:
            return 0.0
        mean = self.total / self.count
        return max(0.0, self.total_of_squares / self.count - mean * mean)


def mismatch_moments(
    learner_logprobs_T: Tensor, behaviour_logprobs_T: Tensor, mask_T: Tensor, versions_T: Tensor, policy_version: int
) -> MismatchMoments:
    """Measure learner minus engine log-prob on the action tokens that ``policy_version`` itself made (lag 0).

    Valid while the learner still holds the weights of ``policy_version``: at the first forward pass of a batch.
    """
    return MismatchMoments.from_tensor(
        mismatch_sums(learner_logprobs_T, behaviour_logprobs_T, mask_T, versions_T, policy_version)
    )


def mismatch_sums(
    learner_logprobs_T: Tensor, behaviour_logprobs_T: Tensor, mask_T: Tensor, versions_T: Tensor, policy_version: int
) -> Tensor:
    """Return the moments of ``mismatch_moments`` as float64 [3] on the device of the log-probs, without waiting for it."""
    require_vector("versions_T", versions_T, mask_T.shape[0])
    delta_T, _ = _mismatch(learner_logprobs_T, behaviour_logprobs_T, mask_T, torch.zeros_like(versions_T), 1)
    fresh_T = mask_T & (versions_T == policy_version)
    # Indexing by the mask would make the host wait for the device to count the chosen tokens.
    fresh_delta_T = torch.where(fresh_T, delta_T, 0).double()
    return torch.stack([fresh_T.double().sum(), fresh_delta_T.sum(), fresh_delta_T.square().sum()])


class MismatchTracker:
    """Running sigma: an exponential average of the variance of the per-token mismatch on lag-0 tokens.

    sigma is 0 (the paper's clip) until something has been measured; a batch with fewer than 2 lag-0 tokens changes nothing.
    Give every rank the same (all-reduced) moments, so that all ranks use the same clip range.
    """

    def __init__(self, *, decay: float = 0.9) -> None:
        require_number("decay", decay, low=0.0, high=1.0)
        self._decay = decay
        self._variance = 0.0
        self._num_updates = 0

    @property
    def sigma(self) -> float:
        """Standard deviation of the mismatch of one token, in nats."""
        return math.sqrt(self._variance)

    @property
    def has_measured(self) -> bool:
        """Whether some batch had tokens of lag 0."""
        return self._num_updates > 0

    def update(self, moments: MismatchMoments) -> None:
        """Take one batch's moments in; the first one counts fully. Raises: ValueError if they are not finite."""
        if not all(map(math.isfinite, (moments.count, moments.total, moments.total_of_squares))):
            raise ValueError(f"moments are {moments}; give finite ones")
        if moments.count < 2:
            return
        decay = self._decay if self._num_updates else 0.0
        self._variance = decay * self._variance + (1 - decay) * moments.variance
        self._num_updates += 1

    def state_dict(self) -> dict[str, float]:
        """Return the averages (nats squared) and the number of updates, for a checkpoint."""
        return {"variance": self._variance, "num_updates": float(self._num_updates)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a saved state. Raises: ValueError for other keys or impossible values."""
        if set(state) != {"variance", "num_updates"}:
            raise ValueError(f"state has keys {sorted(state)}; give those of state_dict: num_updates, variance")
        require_number("variance", state["variance"], low=0.0)
        require_number("num_updates", state["num_updates"], low=0.0)
        self._variance = float(state["variance"])
        self._num_updates = int(state["num_updates"])
