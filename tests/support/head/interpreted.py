"""Runs alone, as Triton's interpreter is chosen before Triton is loaded: the head's kernels, without a GPU.

TRITON_INTERPRET=1 python -m tests.support.head.interpreted; writes a line of JSON for each case, with the distances of
log-probs, entropies and gradients from float64: of the kernels, and of plain PyTorch.
"""

from __future__ import annotations

import json
from itertools import product
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from gspo.model.logprobs import chunked_logprobs, chunks, kernels

T, H, V = 4, 16, 150
BLOCK = 64
"""Two of them and a part of one."""


def main() -> None:
    torch.set_num_threads(1)
    of_a_gpu = {"on_gpu": lambda _: True, "_free_bytes": lambda _: 2**40, "SUMS_IN_FLOAT32": False}
    for dtype, softcap, entropy_gradient in product((torch.float32, torch.bfloat16), (None, 4.0), (False, True)):
        generator = torch.Generator().manual_seed(3)
        hidden, weight = 2 * torch.randn(T, H, generator=generator), torch.randn(V, H, generator=generator)
        hidden[2] *= 60  # most of its probabilities underflow
        leaves = [hidden.to(dtype), weight.to(dtype)]
        given = {
            "targets_T": torch.randint(0, V, (T,), generator=generator),
            "temperatures_T": 0.5 + torch.rand(T, generator=generator),
            "softcap": softcap,
            "entropy_gradient": entropy_gradient,
        }
        upstream = torch.randn(2, T, generator=generator)
        exact = _results(_exact, leaves, upstream, torch.float64, given)
        case: dict[str, Any] = {"dtype": str(dtype), "softcap": softcap, "entropy_gradient": entropy_gradient}
        with mock.patch.multiple(chunks, **of_a_gpu), mock.patch.object(kernels, "BLOCK", BLOCK):
            case["kernels"] = _distances(_results(_chunked, leaves, upstream, dtype, given), exact)
        case["plain"] = _distances(_results(_chunked, leaves, upstream, dtype, given), exact)
        print(json.dumps(case))


def _chunked(hidden_TH: Tensor, weight_VH: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    found = chunked_logprobs(hidden_TH, weight_VH, chunk_tokens=3, with_entropy=True, kept_bytes=0, **given)
    assert found.entropies_T is not None
    return found.logprobs_T, found.entropies_T


def _exact(
    hidden_TH: Tensor, weight_VH: Tensor, *, targets_T: Tensor, temperatures_T: Tensor, softcap: float | None, **_: Any
) -> tuple[Tensor, Tensor]:
    logits_TV = hidden_TH @ weight_VH.t()
    if softcap is not None:
        logits_TV = softcap * torch.tanh(logits_TV / softcap)
    logp_TV = torch.log_softmax(logits_TV / temperatures_T[:, None], -1)
    return logp_TV.gather(-1, targets_T[:, None]).squeeze(-1), -(logp_TV.exp() * logp_TV).sum(-1)


def _results(way: Any, leaves: list[Tensor], upstream: Tensor, dtype: torch.dtype, given: dict[str, Any]) -> list[Tensor]:
    """Log-probs, entropies, and the gradients of hidden states and weight."""
    own = [leaf.to(dtype).requires_grad_() for leaf in leaves]
    logprobs_T, entropies_T = way(*own, **given)
    loss = (logprobs_T * upstream[0]).sum()
    if given["entropy_gradient"]:
        loss = loss + (entropies_T * upstream[1]).sum()
    return [logprobs_T, entropies_T, *torch.autograd.grad(loss, own)]


def _distances(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    """Of the largest value."""
    pairs = zip(found, exact, strict=True)
    return [((one.double() - other).abs().max() / other.abs().max()).item() for one, other in pairs]


if __name__ == "__main__":
    main()
