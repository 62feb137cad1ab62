"""Float32 log-probabilities of given tokens that never hold the full logits.

log p_t = z_t[y_t] - logsumexp(z_t),   z_t = h_t W^T / temperature_t

The head is computed in chunks of rows. Backward recomputes each chunk from the saved hidden states, unless the softmax of
all rows is small. For 2,048 tokens and a vocabulary of 152k this takes a tenth of the memory of log_softmax and gather.

On a GPU kernels.py passes once over the logits that a matrix product wrote, and in backward once more, in place. What a CPU
does is the same in plain PyTorch, and the reference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.torch_version import TorchVersion

from gspo.model.logprobs.choice import kernels_for
from gspo.moe.experts import ExpertPicks

CHUNK_BYTES: Final = {True: 5 * 2**28, False: 256 * 2**20}
"""Logits held at once, on a GPU and on a CPU: some 4,400 rows of bfloat16, or 440 of float32, of a vocabulary of 152k. With
each chunk the embedding is read three times, and its float32 gradient is read and written."""
KEPT_BYTES: Final = 64 * 2**20
"""A softmax of all tokens up to this size is kept for backward, which then need not multiply by the embedding again."""
SUMS_IN_FLOAT32: Final = TorchVersion(torch.__version__) >= "2.10"
"""A GPU's addmm takes a float32 sum of products of half precision (https://github.com/pytorch/pytorch/pull/167931)."""


class TokenLogProbs(NamedTuple):
    """The result of a forward pass on packed sequences."""

    logprobs_T: Tensor
    """float32 [T]; log-probability of each target."""
    entropies_T: Tensor | None
    """float32 [T], with gradient only on request; entropy of the distribution at the given temperature. None unless
    requested."""
    experts: ExpertPicks | None = None
    """Experts chosen in this forward pass; None for a dense model, or where nothing recorded them."""
    own_experts: ExpertPicks | None = None
    """Experts that the routers would have chosen in this pass, where an engine's were put in their place; None elsewhere."""
    balance_loss: Tensor | None = None
    """Scalar with gradient; ``gspo.moe.load_balance`` of this forward pass, times its coefficient. None unless requested."""


class _Way(NamedTuple):
    """How the head is computed."""

    rows: int
    """Of a chunk, at most."""
    with_entropy: bool
    entropy_gradient: bool
    keeps_softmax: bool
    softcap: float | None
    float32: bool
    kernels: ModuleType | None
    """gspo/model/logprobs/kernels.py, or None for plain PyTorch."""

    def room(self, hidden_TH: Tensor, vocabulary: int) -> Tensor:
        """Memory for the logits of a chunk."""
        as_multiplied = self.kernels is not None and not self.float32
        dtype = hidden_TH.dtype if as_multiplied else torch.float32
        return hidden_TH.new_empty(self._size(len(hidden_TH)), vocabulary, dtype=dtype)

    def chunks(self, num_tokens: int) -> Iterator[slice]:
        """As few as possible, because each passes over the whole embedding, and of one size."""
        size = self._size(num_tokens)
        return (slice(start, start + size) for start in range(0, num_tokens, size or 1))

    def _size(self, num_tokens: int) -> int:
        return -(-num_tokens // max(1, -(-num_tokens // self.rows)))


class _ChunkedLogProbs(torch.autograd.Function):
    """Forward keeps hidden states and logsumexp; backward rebuilds the softmax a chunk at a time, unless it is small.

    d log p_t / d z_t = onehot(y_t) - p_t,   p_t = softmax(z_t)
    d H_t / d z_t     = -p_t (log p_t + H_t)
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor, temperatures_T: Tensor, way: _Way
    ) -> tuple[Tensor, Tensor | None]:
        num_tokens, vocabulary = hidden_TH.shape[0], weight_VH.shape[0]
        logprobs_T = hidden_TH.new_empty(num_tokens, dtype=torch.float32)
        normalisers_T = torch.empty_like(logprobs_T)
        entropies_T = torch.empty_like(logprobs_T) if way.with_entropy else None
        softmax_TV = logprobs_T.new_empty(num_tokens, vocabulary) if way.keeps_softmax else None
        room = way.room(hidden_TH, vocabulary)
        beside = torch.empty_like(room) if way.kernels is None and way.with_entropy and not way.keeps_softmax else None
        for rows in way.chunks(num_tokens):
            hidden, targets, temperatures = hidden_TH[rows], targets_T[rows], temperatures_T[rows]
            if way.kernels is not None:
                logits = _products(hidden, weight_VH, room[: len(hidden)])
                found = way.kernels.sums(logits, temperatures, targets, way.softcap, way.with_entropy)
            else:
                logits = _logits(hidden, weight_VH, temperatures, way, room[: len(hidden)])
                found = _sums(logits, targets, beside if softmax_TV is None else softmax_TV[rows], way)
            normalisers_T[rows], logprobs_T[rows] = found[:2]
            if entropies_T is not None:
                entropies_T[rows] = found[2]
        kept_entropies_T = entropies_T if way.entropy_gradient else None
        ctx.save_for_backward(hidden_TH, weight_VH, targets_T, temperatures_T, normalisers_T, softmax_TV, kept_entropies_T)
        ctx.way = way
        if entropies_T is not None and not way.entropy_gradient:
            ctx.mark_non_differentiable(entropies_T)
        return logprobs_T, entropies_T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VH, targets_T, temperatures_T, normalisers_T, softmax_TV, entropies_T = ctx.saved_tensors
        way: _Way = ctx.way
        grad_hidden_TH, room = torch.empty_like(hidden_TH), way.room(hidden_TH, weight_VH.shape[0])
        # float32, because this adds up the chunks. None where adapters alone are trained.
        total_VH = torch.empty_like(weight_VH, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        if total_VH is not None and len(hidden_TH) == 0:
            total_VH.zero_()
        for rows in way.chunks(len(hidden_TH)):
            hidden, targets, temperatures = hidden_TH[rows], targets_T[rows], temperatures_T[rows]
            gradient, entropies, by_entropy = gradients[0][rows] / temperatures, None, None
            if entropies_T is not None:
                entropies, by_entropy = entropies_T[rows], gradients[1][rows] / temperatures
            given = (temperatures, targets, normalisers_T[rows], gradient, entropies, by_entropy)
            if way.kernels is not None:
                slopes = _products(hidden, weight_VH, room[: len(hidden)])
                way.kernels.slopes_(slopes, *given, way.softcap)
            elif softmax_TV is not None:
                slopes = _slopes(softmax_TV[rows], None, *given, room[: len(hidden)])
            else:
                logits = _logits(hidden, weight_VH, temperatures, way, room[: len(hidden)])
                bend = None if way.softcap is None else 1 - (logits * temperatures[:, None] / way.softcap) ** 2
                slopes = _slopes(logits.sub_(normalisers_T[rows, None]).exp_(), bend, *given, logits)
            slopes = slopes.to(hidden.dtype)
            torch.mm(slopes, weight_VH, out=grad_hidden_TH[rows])
            if total_VH is not None:
                _add_products(total_VH, slopes, hidden, is_first=rows.start == 0)
            del slopes
        # Gone before there is a second copy of the weight's gradient.
        del room
        return grad_hidden_TH, None if total_VH is None else total_VH.to(weight_VH.dtype), None, None, None


def on_gpu(tensor: Tensor) -> bool:
    """Whether a GPU's branches are taken. Tests replace it."""
    return tensor.is_cuda


def _products(hidden: Tensor, weight_VH: Tensor, out: Tensor) -> Tensor:
    """Put h W^T into ``out``. Float32 of half precision: never rounded, as SGLang's fp32 head."""
    if out.dtype == hidden.dtype:
        return torch.mm(hidden, weight_VH.t(), out=out)
    if on_gpu(hidden):
        # Products of bfloat16 are exact in float32, in which the kernel adds them up: no copy, and no more time.
        return torch.mm(hidden, weight_VH.t(), out_dtype=torch.float32, out=out)
    return torch.mm(hidden.float(), weight_VH.float().t(), out=out)


def _logits(hidden: Tensor, weight_VH: Tensor, temperatures: Tensor, way: _Way, out: Tensor) -> Tensor:
    """Put float32 z [rows, V] into ``out``."""
    if hidden.dtype == torch.float32 and way.softcap is None:
        # Hidden states are divided at less cost than logits.
        return _products(hidden / temperatures[:, None], weight_VH, out)
    if hidden.dtype == torch.float32 or way.float32:
        _products(hidden, weight_VH, out)
    else:
        out.copy_(hidden @ weight_VH.t())
    if way.softcap is not None:
        out.div_(way.softcap).tanh_().mul_(way.softcap)
    return out.div_(temperatures[:, None])


def _sums(logits: Tensor, targets: Tensor, room: Tensor | None, way: _Way) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return what the kernel of this name does. Changes the logits, and puts the softmax into ``room`` if it is kept."""
    largest, chosen = logits.amax(dim=-1, keepdim=True), logits.gather(-1, targets[:, None])
    # One pass of exp serves the normaliser, the entropy and the softmax.
    exponentials = torch.sub(logits, largest, out=logits if room is None else room[: len(logits)]).exp_()
    sums = exponentials.sum(dim=-1, keepdim=True)
    normaliser = (largest + sums.log()).squeeze(-1)
    entropies = None
    if way.with_entropy:
        entropies = normaliser - logits.mul_(exponentials).sum(dim=-1) / sums.squeeze(-1)
    if way.keeps_softmax:
        exponentials.div_(sums)
    return normaliser, chosen.squeeze(-1) - normaliser, entropies


def _slopes(
    softmax: Tensor,
    bend: Tensor | None,
    temperatures: Tensor,
    targets: Tensor,
    normalisers: Tensor,
    gradient: Tensor,
    entropies: Tensor | None,
    by_entropy: Tensor | None,
    out: Tensor,
) -> Tensor:
    """Put into ``out``, which may be the softmax, what the kernel of this name does."""
    factor, of_entropy = -gradient, None
    if entropies is not None and by_entropy is not None:
        factor = factor - by_entropy * entropies
        # xlogy: p log p is 0 for a probability that has underflowed.
        of_entropy = torch.special.xlogy(softmax, softmax).mul_(by_entropy[:, None])
    torch.mul(softmax, factor[:, None], out=out)
    if of_entropy is not None:
        out.sub_(of_entropy)
    out.scatter_add_(-1, targets[:, None], gradient[:, None])
    return out if bend is None else out.mul_(bend)


def _add_products(total_VH: Tensor, slopes: Tensor, hidden: Tensor, *, is_first: bool) -> None:
    """Add the gradient of the weight to ``total_VH``, which holds nothing before the first."""
    if hidden.dtype == total_VH.dtype:
        total_VH.addmm_(slopes.t(), hidden, beta=0 if is_first else 1)
    elif on_gpu(hidden) and SUMS_IN_FLOAT32:
        beta = 0 if is_first else 1
        torch.addmm(total_VH, slopes.t(), hidden, out_dtype=torch.float32, beta=beta, out=total_VH)
    elif is_first:
        total_VH.copy_(slopes.t() @ hidden)
    else:
        total_VH.add_(slopes.t() @ hidden)


def rows_at_once(
    vocabulary: int, chunk_tokens: int, *, cuda: bool, logit_bytes: int = 4, free_bytes: float = math.inf
) -> int:
    """Return how many rows of logits are held at a time: ``chunk_tokens``, or what fits in CHUNK_BYTES and half of what is
    free; one at least."""
    return min(chunk_tokens, max(1, int(min(CHUNK_BYTES[cuda], free_bytes / 2)) // (logit_bytes * vocabulary)))


def _free_bytes(device: torch.device) -> int:
    """What a GPU has left, with what PyTorch keeps of it for later."""
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def chunked_logprobs(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    temperatures_T: Tensor,
    *,
    chunk_tokens: int,
    with_entropy: bool = False,
    entropy_gradient: bool = False,
    kept_bytes: int = KEPT_BYTES,
    softcap: float | None = None,
    float32: bool = False,
    fused: bool = True,
) -> TokenLogProbs:
    """Return log-probabilities of ``targets_T`` at ``temperatures_T``, differentiable in hidden states and weight.

    Args:
        hidden_TH: [T, H] last hidden states.
        weight_VH: [V, H] output embedding.
        targets_T: int64 [T].
        temperatures_T: float32 [T]; divides the logits, as the sampler did.
        chunk_tokens: rows of logits held at once, limited to what fits in CHUNK_BYTES and, on a GPU, in half of the memory
            that is free. There are one or two copies, whatever T and V.
        entropy_gradient: the entropies carry a gradient too; only with ``with_entropy``.
        kept_bytes: a softmax [T, V] of at most this size is kept for backward; 0 always recomputes it. Not with kernels.
        softcap: logits are c tanh(z / c) before the temperature divides them; the softmax is then never kept.
        float32: hidden states and weight of a half precision are multiplied in float32, so that no logit is rounded to it.
            On a CPU a chunk then takes a float32 copy of the weight. Gradients stay in the precision of the states.
        fused: a GPU uses Triton kernels where it can (``kernels_for``), which need a C compiler; else plain PyTorch, which
            moves six times as many bytes.
    """
    vocabulary, is_on_gpu = weight_VH.shape[0], on_gpu(hidden_TH)
    kernels = None
    if fused and is_on_gpu:
        has_values = torch.cuda.is_available() and not isinstance(hidden_TH, FakeTensor)
        kernels = kernels_for(hidden_TH.device, has_values=has_values)
    free_bytes, logit_bytes = math.inf, 4
    if is_on_gpu:
        size = hidden_TH.element_size()
        # Plain PyTorch has two copies in float32; a float32 head one, and the gradient of half precision.
        logit_bytes = 8 if kernels is None else 4 + size if float32 and size < 4 else size
        # The gradient of the weight, and its sum.
        of_weight = weight_VH.numel() * (4 + weight_VH.element_size()) if weight_VH.requires_grad else 0
        free_bytes = max(0, _free_bytes(hidden_TH.device) - of_weight)
    rows = rows_at_once(vocabulary, chunk_tokens, cuda=is_on_gpu, logit_bytes=logit_bytes, free_bytes=free_bytes)
    is_small = 4 * hidden_TH.shape[0] * vocabulary <= kept_bytes
    keeps_softmax = torch.is_grad_enabled() and softcap is None and kernels is None and is_small
    way = _Way(rows, with_entropy, entropy_gradient, keeps_softmax, softcap, float32, kernels)
    logprobs_T, entropies_T = _ChunkedLogProbs.apply(hidden_TH, weight_VH, targets_T, temperatures_T, way)
    return TokenLogProbs(logprobs_T, entropies_T)
