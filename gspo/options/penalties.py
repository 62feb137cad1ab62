"""Penalties on each token's term: distance from a reference model, and lack of entropy.

With d_t = log pi_ref(y_t) - log pi_theta(y_t) and y_t from the policy, three estimators of KL(pi_theta || pi_ref)
(Schulman, http://joschu.net/blog/kl-approx.html):

    k1 = -d            unbiased; may be negative
    k2 = d^2 / 2       biased; its gradient is that of the KL, on average
    k3 = e^d - 1 - d   unbiased and never negative; GRPO's (arXiv 2402.03300, eq. 4)

In the loss, kl_coefficient * k_t is subtracted from the term of each token. In the reward, kl_coefficient times the sum of
k_t over the sequence is subtracted from its reward, before advantages are made of the rewards (RLOO, arXiv 2402.14740,
section 2). As a loss, k1 has a gradient of 0 on average, whatever the reference, and ``Objective`` refuses it there.

The entropy bonus adds entropy_coefficient * H_t to each token's term, H_t = -sum_v pi(v) log pi(v) over the vocabulary
(Williams and Peng, 1991; A3C, arXiv 1602.01783).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gspo.inputs.units import segment_mean, segment_sum
from gspo.inputs.validation import require_finite, require_mask, require_precise, require_vector, trusted_values
from gspo.mismatch import MAX_LOG_WEIGHT
from gspo.settings import KlEstimator, Objective


def kl_estimates(
    logprobs_T: Tensor, reference_logprobs_T: Tensor, mask_T: Tensor, estimator: KlEstimator, *, clamp: float
) -> Tensor:
    """Return k_t at action tokens and 0 elsewhere, in nats, with the gradient of ``logprobs_T``.

    Nothing is read where ``mask_T`` (bool) is False. clamp: |d| above it is clamped, and keeps its gradient, as the ratio's.
    Raises: ValueError naming the first reference log-prob at an action token that is not finite, or another shape or type.
    """
    require_vector("logprobs_T", logprobs_T)
    require_vector("mask_T", mask_T, logprobs_T.shape[0])
    require_mask("mask_T", mask_T)
    require_vector("reference_logprobs_T", reference_logprobs_T, logprobs_T.shape[0])
    require_precise("reference_logprobs_T", reference_logprobs_T)
    require_finite("reference_logprobs_T", reference_logprobs_T, mask_T)
    zero = logprobs_T.new_zeros(())
    logp_T = torch.where(mask_T, logprobs_T, zero)
    reference_T = torch.where(mask_T, reference_logprobs_T.detach().to(logp_T.dtype), zero)
    d_T = (reference_T - logp_T.detach()).clamp(-clamp, clamp) - (logp_T - logp_T.detach())
    if estimator == "k1":
        return -d_T
    if estimator == "k2":
        return d_T.square() / 2
    # expm1 keeps the digits of a small d.
    return torch.expm1(d_T) - d_T


def token_penalties(
    objective: Objective,
    logprobs_T: Tensor,
    mask_T: Tensor,
    *,
    reference_logprobs_T: Tensor | None,
    entropy_T: Tensor | None,
) -> Tensor | None:
    """Return kl_coefficient * k_t - entropy_coefficient * H_t as ``objective`` asks, with gradient; None for neither.

    Raises: ValueError if reference log-probs are missing, or given and not used; if entropies are missing or, while
    gradients are recorded, have none; or as ``kl_estimates``.
    """
    if objective.needs_reference_logprobs != (reference_logprobs_T is not None):
        raise ValueError(_MISSING_REFERENCE if reference_logprobs_T is None else _UNUSED_REFERENCE)
    penalty_T: Tensor | None = None
    if reference_logprobs_T is not None:
        clamp = objective.log_ratio_clamp
        kl_T = kl_estimates(logprobs_T, reference_logprobs_T, mask_T, objective.kl_estimator, clamp=clamp)
        penalty_T = objective.kl_coefficient * kl_T
    if objective.entropy_coefficient > 0:
        bonus_T = objective.entropy_coefficient * _entropies(logprobs_T, mask_T, entropy_T)
        penalty_T = -bonus_T if penalty_T is None else penalty_T - bonus_T
    return penalty_T


def _entropies(logprobs_T: Tensor, mask_T: Tensor, entropy_T: Tensor | None) -> Tensor:
    """H_t in the dtype of the log-probs, 0 off the mask."""
    if entropy_T is None or (logprobs_T.requires_grad and not entropy_T.requires_grad):
        raise ValueError(_MISSING_ENTROPY if entropy_T is None else _ENTROPY_WITHOUT_GRADIENT)
    require_vector("entropy_T", entropy_T, mask_T.shape[0])
    require_precise("entropy_T", entropy_T)
    require_finite("entropy_T", entropy_T.detach(), mask_T)
    return torch.where(mask_T, entropy_T, 0.0).to(logprobs_T.dtype)


def sequence_kl(
    objective: Objective,
    logprobs_T: Tensor,
    reference_logprobs_T: Tensor,
    mask_T: Tensor,
    sequence_ids_T: Tensor,
    num_sequences: int,
) -> Tensor:
    """Return what ``objective`` with kl_in "reward" takes from each reward: kl_coefficient * sum of k_t, without gradient.

    Raises: ValueError as ``kl_estimates``.
    """
    kl_T = kl_estimates(
        logprobs_T.detach(), reference_logprobs_T, mask_T, objective.kl_estimator, clamp=objective.log_ratio_clamp
    )
    return objective.kl_coefficient * segment_sum(kl_T, torch.where(mask_T, sequence_ids_T, 0).long(), num_sequences)


def reference_kl(
    logprobs_T: Tensor, reference_logprobs_T: Tensor, mask_T: Tensor, sequence_ids_T: Tensor, num_sequences: int
) -> Tensor:
    """Return the mean of k3 over each sequence's action tokens, in nats per token, without gradient: a diagnostic.

    The log-probs were checked before. |d| is at most MAX_LOG_WEIGHT.
    """
    with trusted_values():
        kl_T = kl_estimates(logprobs_T.detach(), reference_logprobs_T, mask_T, "k3", clamp=MAX_LOG_WEIGHT)
    return segment_mean(kl_T, mask_T, torch.where(mask_T, sequence_ids_T, 0).long(), num_sequences)


_MISSING_REFERENCE = (
    "reference_logprobs_T is missing with a kl_coefficient above 0 and kl_in 'loss'; give the reference model's log-probs "
    "of the same tokens, from a pass without gradient, or set kl_coefficient = 0"
)
_MISSING_ENTROPY = (
    "entropy_T is missing with an entropy_coefficient above 0; give the entropy of each token's distribution with its "
    "gradient, or set entropy_coefficient = 0"
)
_ENTROPY_WITHOUT_GRADIENT = (
    "entropy_T carries no gradient with an entropy_coefficient above 0, so the bonus would do nothing; compute it with its "
    "gradient (chunked_logprobs with entropy_gradient=True), or set entropy_coefficient = 0"
)
_UNUSED_REFERENCE = (
    "reference_logprobs_T is given, and this objective has no KL in the loss; leave it out, or set kl_coefficient and "
    "kl_in = 'loss' (with kl_in = 'reward' take gspo.sequence_kl from the rewards, before the advantages)"
)
