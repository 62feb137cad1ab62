"""Two Triton kernels: each passes over a chunk's logits once, as the matrix product left them, bfloat16 or float32.

    x_t = softcap(z_t) / temperature_t     softcap(z) = c tanh(z / c)
    p_t = softmax(x_t)

``sums`` reads the logits z, ``slopes_`` puts the gradient in their place. chunks.py has the same in plain PyTorch, which is
the reference: ``learner.fused_head`` chooses. All arithmetic is float32.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK: Final = 4096
"""Logits that a program has at once."""
OPTIONS: Final = {"num_warps": 8, "enable_fp_fusion": True}


@triton.jit
def _tempered(z: tl.tensor, temperature: tl.tensor, softcap: tl.tensor, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return x, and softcap's share of its slope."""
    slope = 1.0
    if CAPPED:
        # tanh(a) = 1 - 2 / (exp(2a) + 1), and from 20 on it is 1 in float32.
        bent = 1 - 2 / (tl.exp(2 * tl.minimum(z / softcap, 20.0)) + 1)
        z, slope = softcap * bent, 1 - bent * bent
    return z / temperature, slope


@triton.jit
def _sums(  # type: ignore[no-untyped-def]
    logits, temperatures, targets, normalisers, logprobs, entropies, vocabulary, softcap,
    CAPPED: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """One row: sums of exp(x - m) and x exp(x - m) under the largest x so far, m."""
    row = tl.program_id(0).to(tl.int64)
    z = logits + row * vocabulary
    temperature = tl.load(temperatures + row)
    largest, total, weighted = -float("inf"), 0.0, 0.0
    for start in range(0, vocabulary, BLOCK):
        places = start + tl.arange(0, BLOCK)
        here = places < vocabulary
        x, _ = _tempered(tl.load(z + places, mask=here, other=0.0).to(tl.float32), temperature, softcap, CAPPED)
        above = tl.maximum(largest, tl.max(tl.where(here, x, -float("inf"))))
        shrunk = tl.exp(largest - above)
        exponentials = tl.where(here, tl.exp(x - above), 0.0)
        total = total * shrunk + tl.sum(exponentials)
        if ENTROPY:
            weighted = weighted * shrunk + tl.sum(x * exponentials)
        largest = above
    normaliser = largest + tl.log(total)
    chosen, _ = _tempered(tl.load(z + tl.load(targets + row)).to(tl.float32), temperature, softcap, CAPPED)
    tl.store(normalisers + row, normaliser)
    tl.store(logprobs + row, chosen - normaliser)
    if ENTROPY:
        tl.store(entropies + row, normaliser - weighted / total)


@triton.jit
def _slopes(  # type: ignore[no-untyped-def]
    logits, temperatures, targets, normalisers, gradients, entropies, by_entropies, vocabulary, softcap,
    CAPPED: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = places < vocabulary
    z = logits + row * vocabulary + places
    x, bend = _tempered(tl.load(z, mask=here, other=0.0).to(tl.float32), tl.load(temperatures + row), softcap, CAPPED)
    log_p = x - tl.load(normalisers + row)
    gradient = tl.load(gradients + row)
    p = tl.exp(log_p)
    slope = -gradient * p
    if ENTROPY:
        slope -= tl.load(by_entropies + row) * p * (log_p + tl.load(entropies + row))
    slope += tl.where(places == tl.load(targets + row), gradient, 0.0)
    if CAPPED:
        slope *= bend
    tl.store(z, slope.to(logits.dtype.element_ty), mask=here)


def _unset_sums(logits: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    rows = logits.shape[0]
    normalisers, logprobs = (logits.new_empty(rows, dtype=torch.float32) for _ in range(2))
    return normalisers, logprobs, logits.new_empty(rows if with_entropy else 0, dtype=torch.float32)


@torch.library.custom_op("gspo::logit_sums", mutates_args=())
def sums(
    logits: Tensor, temperatures: Tensor, targets: Tensor, softcap: float | None, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logsumexp(x_t), log p_t of the targets, and entropies, empty unless wanted: float32 [rows].

    Args:
        logits: [rows, V], contiguous.
        temperatures: float32 [rows], contiguous.
        targets: int64 [rows], contiguous.
    """
    found = _unset_sums(logits, with_entropy)
    rows, vocabulary = logits.shape
    _sums[(rows,)](
        logits, temperatures, targets, *found, vocabulary, 1.0 if softcap is None else softcap,
        CAPPED=softcap is not None, ENTROPY=with_entropy, BLOCK=BLOCK, **OPTIONS,
    )  # fmt: skip
    return found


@torch.library.custom_op("gspo::logit_slopes_", mutates_args=("logits",))
def slopes_(
    logits: Tensor,
    temperatures: Tensor,
    targets: Tensor,
    normalisers: Tensor,
    gradients: Tensor,
    entropies: Tensor | None,
    by_entropies: Tensor | None,
    softcap: float | None,
) -> None:
    """Put the gradient in z in the place of the logits.

    Args:
        logits, temperatures, targets: as of ``sums``.
        normalisers, entropies: what that returned.
        gradients: float32 [rows]; of the log-probs, over the temperatures.
        by_entropies: float32 [rows]; of the entropies, over the temperatures. With ``entropies``, or neither.
    """
    rows, vocabulary = logits.shape
    _slopes[(rows, triton.cdiv(vocabulary, BLOCK))](
        logits, temperatures, targets, normalisers, gradients, entropies, by_entropies,
        vocabulary, 1.0 if softcap is None else softcap,
        CAPPED=softcap is not None, ENTROPY=by_entropies is not None, BLOCK=BLOCK, **OPTIONS,
    )  # fmt: skip


@sums.register_fake
def _sums_without_values(
    logits: Tensor, temperatures: Tensor, targets: Tensor, softcap: float | None, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _unset_sums(logits, with_entropy)


@slopes_.register_fake
def _nothing(*_: Any) -> None:
    """It returns nothing, and its change of values is not one of shapes."""
