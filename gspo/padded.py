"""The loss of padded responses: the same objective as ``gspo.loss``, for tensors [S, L] of S rows of at most L tokens.

It only lays the rows end to end: values, gradients and statistics are those of the packed layout, to the bit.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gspo.calibration import Calibration
from gspo.loss import LossOutput, TokenRatios, objective_loss
from gspo.settings import Objective


def padded_loss(
    objective: Objective,
    logprobs_SL: Tensor,
    behaviour_logprobs_SL: Tensor,
    advantages: Tensor,
    mask_SL: Tensor,
    turn_ids_SL: Tensor | None = None,
    *,
    num_sequences: int,
    lag_S: Tensor | None = None,
    sigma: float = 0.0,
    clip_scale: float = 1.0,
    calibration: Calibration | None = None,
    proximal_logprobs_SL: Tensor | None = None,
    reference_logprobs_SL: Tensor | None = None,
    entropy_SL: Tensor | None = None,
    group_ids_S: Tensor | None = None,
    num_tokens: int | None = None,
    with_tokens: bool = False,
) -> LossOutput:
    """Return the loss that ``objective`` asks for, of responses in rows; arguments as in ``gspo.objective_loss``.

    mask_SL: bool, True at the tokens that the policy sampled: not at padding, prompts or tool output. Nothing is read where
    it is False, on either side of a row. advantages: [S], one per response, or [S, L]. num_sequences: N, of the whole
    optimizer step: S, if this is all of it. lag_S: None for lag 0.
    Raises: ValueError as ``gspo.objective_loss``, and for shapes that do not fit together.
    """
    if logprobs_SL.dim() != 2:
        raise ValueError(f"logprobs_SL has shape {tuple(logprobs_SL.shape)}; give [S, L], or flat tensors to objective_loss")
    shape = logprobs_SL.shape
    num_rows, length = shape
    optional = {
        "turn_ids_SL": turn_ids_SL,
        "proximal_logprobs_SL": proximal_logprobs_SL,
        "reference_logprobs_SL": reference_logprobs_SL,
        "entropy_SL": entropy_SL,
    }
    for name, values in {"behaviour_logprobs_SL": behaviour_logprobs_SL, "mask_SL": mask_SL, **optional}.items():
        if values is not None and values.shape != shape:
            raise ValueError(f"{name} has shape {tuple(values.shape)} where logprobs_SL has {tuple(shape)}")
    if advantages.shape not in (shape, shape[:1]):
        raise ValueError(f"advantages has shape {tuple(advantages.shape)}; give ({num_rows},) or {tuple(shape)}")
    advantages_SL = advantages if advantages.dim() == 2 else advantages[:, None].expand(shape)
    output = objective_loss(
        objective,
        logprobs_SL.reshape(-1),
        behaviour_logprobs_SL.reshape(-1),
        advantages_SL.reshape(-1),
        mask_SL.reshape(-1),
        torch.arange(num_rows, device=logprobs_SL.device).repeat_interleave(length),
        _flat(turn_ids_SL),
        num_sequences=num_sequences,
        lag_S=torch.zeros(num_rows, device=logprobs_SL.device) if lag_S is None else lag_S,
        sigma=sigma,
        clip_scale=clip_scale,
        calibration=calibration,
        proximal_logprobs_T=_flat(proximal_logprobs_SL),
        reference_logprobs_T=_flat(reference_logprobs_SL),
        entropy_T=_flat(entropy_SL),
        group_ids_S=group_ids_S,
        num_tokens=num_tokens,
        with_tokens=with_tokens,
    )
    if output.tokens is None:
        return output
    of_tokens = (output.tokens.ratio, output.tokens.clipped_high, output.tokens.clipped_low)
    return replace(output, tokens=TokenRatios(*(values_T.reshape(shape) for values_T in of_tokens)))


def _flat(values_SL: Tensor | None) -> Tensor | None:
    return None if values_SL is None else values_SL.reshape(-1)
