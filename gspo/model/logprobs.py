"""Float32 log-probabilities of given tokens that never hold the full logits.

log p_t = z_t[y_t] - logsumexp(z_t),   z_t = h_t W^T / temperature_t

The head is computed in chunks of rows. Backward recomputes each chunk from the saved hidden states, unless the softmax of
all rows is small. For 2,048 tokens and a vocabulary of 152k this takes a tenth of the memory of log_softmax and gather.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from gspo.moe.experts import ExpertPicks

CHUNK_BYTES: Final = {"cpu": 256 * 2**20, "cuda": 2**30}
"""Float32 logits held at once, by the kind of device: some 440 or 1,770 rows of a vocabulary of 152k. With each chunk the
embedding is read three times, and its float32 gradient is read and written."""
KEPT_BYTES: Final = 64 * 2**20
"""A softmax of all tokens up to this size is kept for backward, which then need not multiply by the embedding again."""


class Scored(NamedTuple):
    """The targets whose log-probs are wanted: of the others, the head computes nothing, and 0 comes back."""

    places_N: Tensor
    """int64; among the targets [T]."""
    states_N: Tensor
    """int64; the hidden state that predicts each, among those of the row."""


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


class _ChunkedLogProbs(torch.autograd.Function):
    """Forward keeps hidden states and logsumexp; backward rebuilds the softmax a chunk at a time, unless it is small.

    d log p_t / d z_t = onehot(y_t) - p_t,   p_t = softmax(z_t)
    d H_t / d z_t     = -p_t (log p_t + H_t)
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        targets_T: Tensor,
        temperatures_T: Tensor,
        chunk_tokens: int,
        with_entropy: bool,
        entropy_gradient: bool,
        keep_softmax: bool,
        softcap: float | None,
        float32: bool,
    ) -> tuple[Tensor, Tensor | None]:
        num_tokens = hidden_TH.shape[0]
        logprobs_T = hidden_TH.new_empty(num_tokens, dtype=torch.float32)
        normalisers_T = torch.empty_like(logprobs_T)
        entropies_T = torch.empty_like(logprobs_T) if with_entropy else None
        softmax_TV = logprobs_T.new_empty(num_tokens, weight_VH.shape[0]) if keep_softmax else None
        for start in range(0, num_tokens, chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            logits = _logits(hidden_TH[rows], weight_VH, temperatures_T[rows, None], softcap, float32)
            largest = logits.amax(dim=-1, keepdim=True)
            # One pass of exp serves the normaliser, the entropy and the softmax.
            exponentials = (logits - largest).exp_()
            sums = exponentials.sum(dim=-1, keepdim=True)
            normaliser = (largest + sums.log()).squeeze(-1)
            normalisers_T[rows] = normaliser
            logprobs_T[rows] = logits.gather(-1, targets_T[rows, None]).squeeze(-1) - normaliser
            if entropies_T is not None:
                entropies_T[rows] = normaliser - logits.mul_(exponentials).sum(dim=-1) / sums.squeeze(-1)
            if softmax_TV is not None:
                torch.div(exponentials, sums, out=softmax_TV[rows])
            # Otherwise both this chunk's and the next one's would be in memory.
            del logits, exponentials
        kept_entropies_T = entropies_T if entropy_gradient else None
        ctx.save_for_backward(hidden_TH, weight_VH, targets_T, temperatures_T, normalisers_T, softmax_TV, kept_entropies_T)
        ctx.chunk_tokens, ctx.softcap, ctx.float32 = chunk_tokens, softcap, float32
        if entropies_T is not None and not entropy_gradient:
            ctx.mark_non_differentiable(entropies_T)
        return logprobs_T, entropies_T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VH, targets_T, temperatures_T, normalisers_T, softmax_TV, entropies_T = ctx.saved_tensors
        gradient_T = gradients[0] / temperatures_T
        grad_hidden_TH = torch.empty_like(hidden_TH)
        grad_weight_VH = None
        if ctx.needs_input_grad[1]:  # not where adapters alone are trained
            # float32, because this adds up hundreds of chunks.
            grad_weight_VH = torch.zeros(weight_VH.shape, dtype=torch.float32, device=weight_VH.device)
        for start in range(0, hidden_TH.shape[0], ctx.chunk_tokens):
            rows = slice(start, start + ctx.chunk_tokens)
            hidden, gradient, slope = hidden_TH[rows], gradient_T[rows, None], None
            if softmax_TV is None:
                softmax = _logits(hidden, weight_VH, temperatures_T[rows, None], ctx.softcap, ctx.float32)
                if ctx.softcap is not None:
                    slope = 1 - (softmax * temperatures_T[rows, None] / ctx.softcap) ** 2
                softmax.sub_(normalisers_T[rows, None]).exp_()
            else:
                softmax = softmax_TV[rows]
            factor, of_entropy = -gradient, None
            if entropies_T is not None:
                by_entropy = (gradients[1][rows] / temperatures_T[rows])[:, None]
                factor = factor - by_entropy * entropies_T[rows, None]
                # xlogy: p log p is 0 for a probability that has underflowed.
                of_entropy = torch.special.xlogy(softmax, softmax).mul_(by_entropy)
            grad_logits = softmax.mul_(factor) if softmax_TV is None else softmax * factor
            if of_entropy is not None:
                grad_logits.sub_(of_entropy)
            grad_logits.scatter_add_(-1, targets_T[rows, None], gradient)
            if slope is not None:
                grad_logits.mul_(slope)
            cast = grad_logits.to(hidden.dtype)
            grad_hidden_TH[rows] = cast @ weight_VH
            if grad_weight_VH is not None and hidden.dtype == torch.float32:
                grad_weight_VH.addmm_(cast.t(), hidden)
            elif grad_weight_VH is not None:
                grad_weight_VH += cast.t() @ hidden
            del softmax, of_entropy, grad_logits, cast, slope
        return grad_hidden_TH, None if grad_weight_VH is None else grad_weight_VH.to(weight_VH.dtype), *[None] * 8


def _logits(hidden: Tensor, weight_VH: Tensor, temperatures: Tensor, softcap: float | None, float32: bool) -> Tensor:
    """float32 [rows, V] over the temperatures [rows, 1]. ``float32``: never rounded, as SGLang's fp32 head."""
    if not float32 or hidden.dtype == torch.float32:
        logits = hidden @ weight_VH.t()
    elif hidden.is_cuda:
        # Products of bfloat16 are exact in float32, in which the kernel adds them up: no copy, and no more time.
        logits = torch.mm(hidden, weight_VH.t(), out_dtype=torch.float32)
    else:
        logits = hidden.float() @ weight_VH.float().t()
    if softcap is not None:
        logits = logits.float().div_(softcap).tanh_().mul_(softcap)
    # Half precision becomes float32 in the division itself: one pass over the logits less.
    return logits.div_(temperatures) if logits.dtype == torch.float32 else torch.div(logits, temperatures)


def rows_at_once(vocabulary: int, chunk_tokens: int, device: str) -> int:
    """Return how many rows of float32 logits are held at a time: ``chunk_tokens``, or what fits in CHUNK_BYTES."""
    return min(chunk_tokens, max(1, CHUNK_BYTES.get(device, CHUNK_BYTES["cpu"]) // (4 * vocabulary)))


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
) -> TokenLogProbs:
    """Return log-probabilities of ``targets_T`` at ``temperatures_T``, differentiable in hidden states and weight.

    Args:
        hidden_TH: [T, H] last hidden states.
        weight_VH: [V, H] output embedding.
        targets_T: int64 [T].
        temperatures_T: float32 [T]; divides the logits, as the sampler did.
        chunk_tokens: rows of logits held at once, limited to what fits in CHUNK_BYTES. There are two or three copies,
            whatever T and V.
        entropy_gradient: the entropies carry a gradient too, for one more copy of a chunk's logits in backward; only with
            ``with_entropy``.
        kept_bytes: a softmax [T, V] of at most this size is kept for backward; 0 always recomputes it.
        softcap: logits are c tanh(z / c) before the temperature divides them; the softmax is then never kept.
        float32: hidden states and weight of a half precision are multiplied in float32, so that no logit is rounded to it.
            On a CPU a chunk then takes a float32 copy of the weight. Gradients stay in the precision of the states.
    """
    vocabulary = weight_VH.shape[0]
    rows = rows_at_once(vocabulary, chunk_tokens, hidden_TH.device.type)
    keep_softmax = torch.is_grad_enabled() and softcap is None and 4 * hidden_TH.shape[0] * vocabulary <= kept_bytes
    logprobs_T, entropies_T = _ChunkedLogProbs.apply(
        hidden_TH, weight_VH, targets_T, temperatures_T, rows, with_entropy, entropy_gradient, keep_softmax, softcap, float32
    )
    return TokenLogProbs(logprobs_T, entropies_T)


class LogProbHead(nn.Module):
    """The output embedding, which returns log-probabilities instead of logits.

    It is a module, so that ZeRO-3's hooks gather the weight around its forward and backward. It holds the same
    parameter object as the linear layer it replaces: names and tied embeddings stay as they were.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        *,
        chunk_tokens: int,
        softcap: float | None = None,
        factor: float = 1.0,
        float32: bool = False,
    ) -> None:
        """``factor``: by which the model multiplies its logits: as if the temperature were lower."""
        super().__init__()
        self.factor = factor
        self.softcap = softcap
        self.float32 = float32
        self.weight = weight
        self.chunk_tokens = chunk_tokens

    def forward(
        self,
        hidden_TH: Tensor,
        targets_T: Tensor,
        temperatures_T: Tensor,
        with_entropy: bool,
        entropy_gradient: bool = False,
    ) -> TokenLogProbs:
        return chunked_logprobs(
            hidden_TH,
            self.weight,
            targets_T,
            temperatures_T if self.factor == 1 else temperatures_T / self.factor,
            chunk_tokens=self.chunk_tokens,
            with_entropy=with_entropy,
            entropy_gradient=entropy_gradient,
            softcap=self.softcap,
            float32=self.float32,
        )


SOFT_CAPPED: Final = frozenset({"gemma2", "gemma3_text"})
"""Types of models that cap their logits, z -> c tanh(z / c), where ``final_logit_softcapping`` is c."""
MULTIPLIED: Final = frozenset({"cohere", "cohere2", "cohere2_moe"})
"""Types of models that multiply their logits by ``logit_scale``."""
DIVIDED: Final = frozenset({"granite", "granitemoe", "granitemoe_swa", "granitemoeshared"})
"""Types of models that divide them by ``logits_scaling``."""
_COMPUTED: Final = {"final_logit_softcapping": SOFT_CAPPED, "logit_scale": MULTIPLIED, "logits_scaling": DIVIDED}
# Settings with which a model changes its logits after the output embedding, and the value that changes nothing.
_NEUTRAL_LOGIT_SETTINGS: dict[str, float | None] = {
    "final_logit_softcapping": None,
    "logit_scale": None,
    "logits_scaling": None,
    "lm_head_multiplier": None,
}


def attach_logprob_head(model: Any, *, chunk_tokens: int, float32: bool = False) -> None:
    """Make a Hugging Face causal language model return ``TokenLogProbs`` instead of logits.

    Call it as ``model(input_ids=[1, T], position_ids=[1, T], cu_seqlens=, targets_T=, temperatures_T=,
    with_entropy=False, entropy_gradient=False, scored=None)``; other arguments are passed on to attention. The router's
    auxiliary loss never enters: only the hidden states of the backbone are used. ``float32``: as in ``chunked_logprobs``.

    Raises: ValueError for a model that computes its logits by more than one matrix product of the hidden states.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise ValueError(f"output embedding of {type(model).__name__} is {head}; use a model with a bias-free linear one")
    if model.base_model is model:
        raise ValueError(f"{type(model).__name__} has no backbone apart from its head; load it as a causal language model")
    settings = model.config.to_dict()
    kind, factor = settings.get("model_type"), _logit_factor(settings)
    softcap = settings.get("final_logit_softcapping") if kind in SOFT_CAPPED else None
    for name, neutral in _NEUTRAL_LOGIT_SETTINGS.items():
        if kind not in _COMPUTED.get(name, ()) and name in settings and settings[name] not in (neutral, 1, 1.0):
            raise ValueError(f"{type(model).__name__} transforms its logits by {name} = {settings[name]}: not supported")
    assert isinstance(head.weight, nn.Parameter)
    model.set_output_embeddings(
        LogProbHead(head.weight, chunk_tokens=chunk_tokens, softcap=softcap, factor=factor, float32=float32)
    )
    model.forward = types.MethodType(_logprob_forward, model)


def _logit_factor(settings: Mapping[str, Any]) -> float:
    kind = settings.get("model_type")
    factor = settings.get("logit_scale") if kind in MULTIPLIED else 1.0
    divisor = settings.get("logits_scaling") if kind in DIVIDED else 1.0
    return float(1.0 if factor is None else factor) / float(divisor or 1.0)


def _logprob_forward(
    self: Any,
    *,
    input_ids: Tensor,
    position_ids: Tensor,
    cu_seqlens: Sequence[int],
    targets_T: Tensor,
    temperatures_T: Tensor,
    with_entropy: bool = False,
    entropy_gradient: bool = False,
    scored: Scored | None = None,
    **attention: Any,
) -> TokenLogProbs:
    states = self.base_model(
        input_ids=input_ids, position_ids=position_ids, cu_seqlens=cu_seqlens, use_cache=False, **attention
    )
    head, hidden_UH = self.get_output_embeddings(), states.last_hidden_state.squeeze(0)
    if scored is None:
        every: TokenLogProbs = head(hidden_UH, targets_T, temperatures_T, with_entropy, entropy_gradient)
        return every
    places_N = scored.places_N
    found: TokenLogProbs = head(
        hidden_UH[scored.states_N], targets_T[places_N], temperatures_T[places_N], with_entropy, entropy_gradient
    )

    def at_places(values_N: Tensor) -> Tensor:
        return values_N.new_zeros(len(targets_T)).index_copy(0, places_N, values_N)

    return TokenLogProbs(at_places(found.logprobs_T), None if found.entropies_T is None else at_places(found.entropies_T))
