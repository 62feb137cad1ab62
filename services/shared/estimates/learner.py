"""Memory of one rank of the learner."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from gspo_services.shared.estimates.amounts import BYTES, GIB, Span, exactly
from gspo_services.shared.estimates.shape import ModelShape
from gspo_services.shared.settings import Settings

LOGIT_CHUNK_BYTES: Final = {True: 5 * 2**28, False: 256 * 2**20}
"""On a GPU, and on a host: CHUNK_BYTES of gspo/model/logprobs/chunks.py."""
KEPT_SOFTMAX_BYTES: Final = 64 * 2**20
BUCKET_ELEMENTS: Final = 50_000_000
"""reduce_bucket_size of services/learner/engine/configuration.py: gradients, in the dtype of the weights."""
LIVE_ELEMENTS: Final = 10**9
"""DeepSpeed's default of stage3_max_live_parameters: the most that ZeRO 3 keeps gathered."""
CUDA_BYTES: Final = Span(0.8 * GIB, 2.0 * GIB)
"""CUDA's context, NCCL's buffers, kernels."""
CPU_PROCESS_BYTES: Final = Span(0.6 * GIB, 1.2 * GIB)
"""An interpreter with torch, transformers and DeepSpeed."""
ACTIVATIONS_WIDTH: Final = {True: (0.9, 1.1), False: (0.7, 1.5)}
"""Factors on a GPU, as peaks of the real code on paper show them (tests/support/paper), and on a host, whose attention and
experts are loops."""


TENSORS_OF_LINEAR: Final = 20
"""In float32 and as wide as its values: what transformers' delta rule in torch keeps of a layer. Kernels keep less."""
PASSING_OF_DENSE: Final = 2
"""Hidden values of an MLP whose gradients exist at the same time."""


@dataclass(frozen=True, kw_only=True)
class LearnerMemory:
    """Bytes of one rank, on its device (on the host if there is none)."""

    weights: float
    gradients: float
    optimizer: float
    """Masters and moments."""
    reference: float
    """The frozen start model of a KL term."""
    teacher: float
    """The frozen model that scores tokens."""
    activations: Span
    """Logits, with their chunks."""
    bucket: float
    """Gradients on their way to the ranks that keep them: ZeRO 1 in bfloat16 sends all at once, when the activations are
    gone. Only what exceeds these counts."""
    working: Span
    """Gathered layers, and the process itself."""
    weights_on_host: float = 0.0
    """This and the next two: what learner.offload keeps in the host's memory instead."""
    gradients_on_host: float = 0.0
    optimizer_on_host: float = 0.0
    activations_on_host: float = 0.0
    """What learner.activation_offload keeps there: the input of each layer."""

    @property
    def on_host(self) -> float:
        """Everything that is offloaded."""
        return self.weights_on_host + self.gradients_on_host + self.optimizer_on_host + self.activations_on_host

    @property
    def total(self) -> Span:
        """Everything on the device."""
        fixed = self.weights + self.gradients + self.optimizer + self.reference + self.teacher + self.bucket
        return self.activations + self.working + exactly(fixed)


def learner_memory(shape: ModelShape, settings: Settings, *, cuda: bool, teacher_parameters: int = 0) -> LearnerMemory:
    """Compute the table "Memory" of docs/guide/learner.md, with activations, logits and buffers beside it.

    Weights, gradients, masters and moments are exact: bytes of tensors whose sizes are known. Activations are counted from
    what autograd keeps (``activation_bytes_per_token``); their span comes from allocators and kernels.
    """
    learner = settings.learner
    other, experts = shape.other_parameters, shape.expert_parameters
    ranks = learner.num_ranks * learner.num_nodes
    whole, part = other + experts / learner.expert_parallel, (other + experts) / ranks
    size = BYTES[learner.dtype]
    stage = learner.stage_on(ranks, leaves_device=settings.run.colocate)
    weights = size * (part if stage == 3 else whole)
    if settings.lora.is_used:
        # Everything but the weights is of the adapters alone.
        whole = float(trained_parameters(shape, settings))
        part = whole / ranks
        weights += size * (part if stage == 3 else whole)
    # On one rank nothing is sent, and ZeRO 2 keeps the gradients of the backward pass beside their sums, too.
    stay = stage == 1 or (stage == 2 and ranks == 1)
    gradients = 4 * (part if stage >= 2 else whole) + (size * whole if stay else 0)
    # In float32 without ZeRO the weights are their own masters.
    optimizer = 8 * whole if stage == 0 else 12 * part
    weights_on_host = gradients_on_host = optimizer_on_host = 0.0
    if learner.offload != "none":
        optimizer, optimizer_on_host = 0.0, optimizer
        gradients_on_host = (8 if stage == 3 else 4) * part
        gradients = 0.0 if stage == 3 else gradients
    if learner.offload == "optimizer_and_parameters":
        weights, weights_on_host = 0.0, weights
    activations = _activations(shape, settings, cuda=cuda)
    # On a host only written parts of it take memory.
    bucket = size * min(BUCKET_ELEMENTS, math.inf if cuda else whole) if stage > 0 else 0.0
    if stage == 1 and learner.dtype == "bfloat16":
        bucket = max(bucket, size * whole - activations.low)
    return LearnerMemory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        reference=size * (other + experts) if settings.objective.kl_coefficient > 0 else 0.0,
        teacher=float(size * teacher_parameters),
        activations=activations,
        bucket=bucket,
        working=_working(shape, settings, cuda=cuda),
        weights_on_host=weights_on_host,
        gradients_on_host=gradients_on_host,
        optimizer_on_host=optimizer_on_host,
        activations_on_host=_checkpoints(shape, settings) if learner.activation_offload else 0.0,
    )


def trained_parameters(shape: ModelShape, settings: Settings) -> int:
    """How many parameters have gradients, moments and a place in checkpoints: all, or those of the adapters."""
    lora = settings.lora
    return shape.lora_parameters(lora.rank * lora.num_adapters, lora.target_modules) if lora.is_used else shape.parameters


def _working(shape: ModelShape, settings: Settings, *, cuda: bool) -> Span:
    learner = settings.learner
    working = CUDA_BYTES if cuda else CPU_PROCESS_BYTES
    if learner.zero_stage == 3:
        layer = shape.gathered_layer(learner.expert_parallel)
        size = BYTES[learner.dtype]
        # What arrives lies in a buffer, from which it is copied into the parameters.
        live = min(live_elements(layer), shape.parameters) + 3 * layer // 2
        low, high = ACTIVATIONS_WIDTH[cuda]
        working = working + Span(size * live * low, size * live * high)
    return working


def live_elements(layer: int) -> int:
    """Return how many elements ZeRO 3 may keep gathered: a layer of ``layer``, the next one, and everything between them."""
    return max(LIVE_ELEMENTS, 5 * layer // 2)


def _activations(shape: ModelShape, settings: Settings, *, cuda: bool) -> Span:
    """A micro-batch's peak: while a layer goes backward, or while the log-probs do, which come before it."""
    learner = settings.learner
    size, tokens = BYTES[learner.dtype], _tokens(settings)
    kept, passing = activation_bytes_per_token(shape, size, learner.mlp_tiles)
    if learner.activation_checkpointing:
        kept_by_all = 0.0 if learner.activation_offload else _checkpoints(shape, settings) / tokens
        of_layers, of_one = kept_by_all, kept + passing
    else:
        of_layers, of_one = kept * shape.layers, passing
    layers = tokens * (of_layers + of_one)
    if settings.lora.is_used and "experts" in settings.lora.target_modules:
        # The sum of weights and change of every layer whose activations are kept.
        layers += size * shape.expert_parameters / (shape.layers if learner.activation_checkpointing else 1)
    peak = max(layers, tokens * of_layers + _logprobs(shape, settings, cuda=cuda))
    low, high = ACTIVATIONS_WIDTH[cuda]
    return Span(peak * low, peak * high)


def _logprobs(shape: ModelShape, settings: Settings, *, cuda: bool) -> float:
    """Chunks of logits as docs/evidence/performance.md has them ("Memory of the log-probs"), and the head's gradient, which
    is summed in float32."""
    learner, tokens = settings.learner, _tokens(settings)
    # Kernels need no second copy, and leave logits of half precision as they are.
    size = BYTES[learner.dtype]
    in_kernels = 4 + size if settings.model.float32_head and size < 4 else size
    each = (in_kernels if learner.fused_head else 8) if cuda else 4
    rows = min(learner.logprob_chunk_tokens, max(1, LOGIT_CHUNK_BYTES[cuda] // (each * shape.vocabulary)))
    softmax = 4 * tokens * shape.vocabulary
    kept = softmax if softmax <= KEPT_SOFTMAX_BYTES and not (cuda and learner.fused_head) else 0
    chunk, summed = each * min(rows, tokens) * shape.vocabulary, 4 * shape.vocabulary * shape.hidden
    if cuda:
        return float(summed + max(chunk, size * shape.vocabulary * shape.hidden))
    return float(2 * chunk + kept + summed * (1 + size / 4))


def _tokens(settings: Settings) -> int:
    """Return the most tokens of a micro-batch. A longer sequence travels alone, on as many ranks as share it."""
    learner = settings.learner
    return max(learner.max_tokens_per_micro_batch, -(-settings.largest_sampling.max_tokens // learner.sequence_parallel))


def _checkpoints(shape: ModelShape, settings: Settings) -> float:
    """The input of each layer, from which its activations are computed again."""
    return float(BYTES[settings.learner.dtype] * shape.hidden * shape.layers * _tokens(settings))


def activation_bytes_per_token(shape: ModelShape, element_bytes: int, mlp_tiles: int = 1) -> tuple[float, float]:
    """What autograd keeps of one layer for one token, in transformers' eager code with attention that stores no scores,
    and what one layer at a time takes beside it: of an MLP in tiles its input is kept, and one tile is computed again.

        norms       2 x (a float32 copy H, the normalised H, the scaled H)
        heads       their norm where there is one: 3 of Q + K;  attention's q, k, v and result;  the projection's input
                    or ``Latent.kept``;  or what the delta rule keeps in float32
        gated MLP   gate, its activation, up, their product: 4 I;  for k experts 4 k I_e, and their inputs and outputs

    The terms follow Korthikanti et al. 2022 (arXiv 2205.05198), for RMSNorm, grouped heads and a gated MLP.
    """
    size, width = element_bytes, shape.head_dim
    query, keys = shape.heads * width, shape.kv_heads * width
    norms = 2 * shape.hidden * ((4 if size < 4 else 0) + 2 * size)
    if size == 4:
        norms += 2 * shape.hidden * size  # the copy is the tensor itself, which the residual keeps in any case
    heads = (query + keys) * (4 + 2 * size) if shape.normalises_heads else 0
    attention = float(size * (query + 2 * keys + 2 * query))
    if shape.latent is not None:
        attention = size * shape.latent.kept(shape.heads) + (shape.latent.q_rank + shape.latent.kv_rank) * (4 + 2 * size)
    if shape.linear is not None:
        attention = max(attention, 4.0 * TENSORS_OF_LINEAR * shape.linear.value_width)
    if shape.experts:
        chosen = shape.experts_per_token
        mlp = size * chosen * (4 * shape.expert_ffn + 2 * shape.hidden) + 4 * 2 * shape.experts
        mlp += size * 4 * shape.shared_ffn
    else:
        mlp = size * 4 * shape.ffn
    if shape.experts:
        # Backward, the rows of all chosen experts are gathered, filled with zeros and added up again.
        wide = max(size, 4 if shape.float32_gates else 0)
        return float(norms + heads + attention + mlp), float(3 * wide * shape.experts_per_token * shape.hidden)
    if mlp_tiles == 1:
        return float(norms + heads + attention + mlp), float(PASSING_OF_DENSE * size * shape.ffn)
    return float(norms + heads + attention + size * shape.hidden), mlp / mlp_tiles
