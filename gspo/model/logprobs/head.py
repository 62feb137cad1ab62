"""The output embedding of a Hugging Face model, which returns log-probabilities instead of logits."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from torch import Tensor, nn

from gspo.model.logprobs.chunks import TokenLogProbs, chunked_logprobs


class Scored(NamedTuple):
    """The targets whose log-probs are wanted: of the others, the head computes nothing, and 0 comes back."""

    places_N: Tensor
    """int64; among the targets [T]."""
    states_N: Tensor
    """int64; the hidden state that predicts each, among those of the row."""


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
        fused: bool = True,
    ) -> None:
        """``factor``: by which the model multiplies its logits: as if the temperature were lower."""
        super().__init__()
        self.factor = factor
        self.softcap = softcap
        self.float32 = float32
        self.fused = fused
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
            fused=self.fused,
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


def attach_logprob_head(model: Any, *, chunk_tokens: int, float32: bool = False, fused: bool = True) -> None:
    """Make a Hugging Face causal language model return ``TokenLogProbs`` instead of logits.

    Call it as ``model(input_ids=[1, T], position_ids=[1, T], cu_seqlens=, targets_T=, temperatures_T=,
    with_entropy=False, entropy_gradient=False, scored=None)``; other arguments are passed on to attention. The router's
    auxiliary loss never enters: only the hidden states of the backbone are used. ``float32`` and ``fused``: as in
    ``chunked_logprobs``.

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
        LogProbHead(head.weight, chunk_tokens=chunk_tokens, softcap=softcap, factor=factor, float32=float32, fused=fused)
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
