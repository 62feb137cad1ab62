"""On-policy distillation: a teacher scores the tokens that the policy sampled, and each token has its own advantage.

    d_t = log pi_teacher(y_t) - log mu(y_t),    A_t = A_i + c d_t,  or c d_t alone

mu sampled y_t, so -d_t is unbiased for KL(mu || pi_teacher) in each context, and raising J lowers that reverse KL (Agarwal
et al., arXiv 2306.13649; as an advantage of each token: Lu et al., "On-Policy Distillation", Thinking Machines, 2025).
GSPO-token (``gspo.loss``) then weighs the tokens of a sequence apart, while its one ratio clips them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gspo.inputs.units import segment_mean
from gspo.inputs.validation import require_finite, require_mask, require_precise


def teacher_advantages(teacher_logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor, *, clamp: float = 10.0) -> Tensor:
    """Return d_t at action tokens and 0 elsewhere, in nats, without gradient; |d_t| is at most ``clamp``.

    All three have one shape, flat or [S, L]; ``mask`` is bool, and nothing is read where it is False. Both log-probs are at
    the sampling temperature. What comes out is added to advantages of the same shape, times a coefficient.
    Raises: ValueError naming the first log-prob of the teacher at an action token that is not finite, or another shape or
    type. With ``trusted_values`` such a token's d_t is NaN.
    """
    require_mask("mask", mask)
    for name, values in (("teacher_logprobs", teacher_logprobs), ("behaviour_logprobs", behaviour_logprobs)):
        if values.shape != mask.shape:
            raise ValueError(f"{name} has shape {tuple(values.shape)}, mask {tuple(mask.shape)}; give one value per token")
        require_precise(name, values)
        require_finite(name, values.flatten(), mask.flatten())
    d = teacher_logprobs.detach() - behaviour_logprobs.detach()
    # Clamped, an infinite value would be taken for an opinion.
    return torch.where(mask, torch.where(d.isfinite(), d, torch.nan).clamp(-clamp, clamp), 0.0)


def teacher_kl(
    teacher_logprobs_T: Tensor, behaviour_logprobs_T: Tensor, mask_T: Tensor, sequence_ids_T: Tensor, num_sequences: int
) -> Tensor:
    """Return the mean of -d_t over each sequence's action tokens, not clamped: KL(mu || pi_teacher) in nats per token.

    A diagnostic of log-probs that were checked before.
    """
    kl_T = torch.where(mask_T, behaviour_logprobs_T.detach() - teacher_logprobs_T.detach(), 0.0)
    return segment_mean(kl_T, mask_T, torch.where(mask_T, sequence_ids_T, 0).long(), num_sequences)
