"""Losses by name, as clients of Tinker's API know them: sums over the tokens of one sequence, without any mean.

With l = log pi_theta of a token's target, mu the log-prob with which it was sampled, A its advantage, r = exp(l - mu):

    cross_entropy         -sum w l                                        targets [N], or [N, K] with a weight each
    importance_sampling   -sum r A
    ppo                   -sum min(r A, clip(r, low, high) A)             low 0.8, high 1.2
    cispo                 -sum sg[clip(r, low, high)] l A                 low 0, high 4
    dro                   -sum (l A - beta/2 (l - mu)^2)                  beta 0.05
    gspo                  -sum min(s_t A, clip(s_t, low, high) A)         low 1 - 3e-4, high 1 + 4e-4
                          s = exp(mean of l - mu over the mask), s_t = sg[s] exp(l - sg[l])

Source: https://tinker-docs.thinkingmachines.ai/tinker/losses. It was read without defaults of dro and gspo: these are an
example's, and those of arXiv 2507.18071. The clip is of ratios, not of their distance from 1. ``gspo.loss`` is this
project's own objective: it has means, and a clip that knows staleness.

Where A is 0, a token adds exactly 0, except to dro. Losses of several sequences add up, and so do their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from gspo.token_loss_names import BETA, BOUNDS, DEFAULT_BETA, DEFAULT_BOUNDS, GIVEN, MASK, require_token_loss


def token_loss(
    name: str, logprobs_N: Tensor, given: Mapping[str, Tensor], options: Mapping[str, float] | None = None
) -> Tensor:
    """Return the loss of one sequence: a scalar of the type of ``logprobs_N``, with gradient by it alone.

    Args:
        logprobs_N: [N], or [N, K] for cross_entropy; of the targets under the policy in training.
        given: what ``GIVEN`` and ``optional_inputs`` of ``gspo.token_loss_names`` name, in the shape of ``logprobs_N``.
        options: of ``BOUNDS`` and ``BETA`` there; see ``require_token_loss``.

    Raises: ValueError for another loss or option, or an input of another shape.
    """
    options = {} if options is None else options
    require_token_loss(name, options)
    for key in GIVEN[name]:
        if key not in given:
            raise ValueError(f"{name} needs {', '.join(GIVEN[name])}, and {key} was not given")
    for key, values in given.items():
        if values.shape != logprobs_N.shape:
            raise ValueError(f"{key} is {list(values.shape)}; it must be {list(logprobs_N.shape)}, as the targets")
    if name == "cross_entropy":
        return -(given["weights"] * logprobs_N).sum()
    return _LOSSES[name](logprobs_N, given, options)


_Loss = Callable[[Tensor, Mapping[str, Tensor], Mapping[str, float]], Tensor]


def _importance_sampling(logp_N: Tensor, given: Mapping[str, Tensor], options: Mapping[str, float]) -> Tensor:
    return -(_log_ratio(logp_N, given).exp() * given["advantages"]).sum()


def _ppo(logp_N: Tensor, given: Mapping[str, Tensor], options: Mapping[str, float]) -> Tensor:
    return _clipped("ppo", _log_ratio(logp_N, given).exp(), given, options)


def _cispo(logp_N: Tensor, given: Mapping[str, Tensor], options: Mapping[str, float]) -> Tensor:
    low, high = _bounds("cispo", given, options)
    weight_N = _log_ratio(logp_N, given).detach().exp().maximum(low).minimum(high)
    return -(weight_N * logp_N * given["advantages"]).sum()


def _dro(logp_N: Tensor, given: Mapping[str, Tensor], options: Mapping[str, float]) -> Tensor:
    distance_N = logp_N - given["logprobs"]
    return -(logp_N * given["advantages"] - 0.5 * options.get(BETA, DEFAULT_BETA) * distance_N.square()).sum()


def _gspo(logp_N: Tensor, given: Mapping[str, Tensor], options: Mapping[str, float]) -> Tensor:
    inside_N = given.get(MASK, given["logprobs"]) != 0
    moved_N = torch.where(inside_N, logp_N.detach() - given["logprobs"], 0.0)
    # Without a sampled token there is nothing to compare: the ratio is 1.
    log_s = moved_N.sum() / inside_N.sum().clamp(min=1)
    return _clipped("gspo", (logp_N - logp_N.detach() + log_s).exp(), given, options)


_LOSSES: Final[Mapping[str, _Loss]] = {
    "importance_sampling": _importance_sampling,
    "ppo": _ppo,
    "cispo": _cispo,
    "dro": _dro,
    "gspo": _gspo,
}


def _log_ratio(logp_N: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    """0 where A is 0: there the ratio may overflow, and infinity times 0 is no number."""
    return torch.where(given["advantages"] == 0, 0.0, logp_N - given["logprobs"])


def _clipped(name: str, ratio_N: Tensor, given: Mapping[str, Tensor], options: Mapping[str, float]) -> Tensor:
    low, high = _bounds(name, given, options)
    advantages_N = given["advantages"]
    # min takes the clipped side, which has no gradient, in these two cases alone.
    outside_N = ((advantages_N > 0) & (ratio_N > high)) | ((advantages_N < 0) & (ratio_N < low))
    bounded_N = torch.where(outside_N, ratio_N.detach().maximum(low).minimum(high), ratio_N)
    return -(bounded_N * advantages_N).sum()


def _bounds(name: str, given: Mapping[str, Tensor], options: Mapping[str, float]) -> tuple[Tensor, Tensor]:
    mu_N = given["logprobs"]
    low, high = (
        given.get(key, torch.tensor(options.get(key, default), dtype=mu_N.dtype, device=mu_N.device))
        for key, default in zip(BOUNDS, DEFAULT_BOUNDS[name], strict=True)
    )
    return low, high
