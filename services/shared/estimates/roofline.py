"""What the ranks of a learner say to each other, and the least time of a step by published rates.

Collectives are those of the real code on paper (tests/support/paper). Real steps take longer: docs/gpu.md says how much.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gspo_services.shared.estimates.amounts import BYTES
from gspo_services.shared.estimates.hardware import Device
from gspo_services.shared.estimates.shape import ModelShape
from gspo_services.shared.estimates.speed import Work, flops_per_trained_token
from gspo_services.shared.settings import Settings

NETWORK: Final = 50e9
"""Bytes a second and direction of a GPU's own network card: 400 Gb/s, as NVIDIA's DGX H100 and H200 have eight of."""
ADAM_BYTES: Final = 30
"""Read and written for a parameter by a step: gradient, master and two moments in float32, and the weight."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that one rank sends; it receives as many."""

    ring: float
    """Weights and gradients of a micro-batch, between all ranks."""
    exchanged: float
    """Tokens of a micro-batch, between the ranks that share its experts or its rows."""
    ring_of_step: float
    """Weights and gradients that are sent once a step."""


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Seconds of a micro-batch, and of the rest of a step, if each part ran at the published rate."""

    operations: float
    ring: float
    exchanged: float
    of_step: float
    """Once a step: Adam's memory, and what is sent then."""
    tokens: int
    """Of the micro-batch, on one rank."""
    useful: float
    """Seconds of the operations without those of checkpointing."""

    @property
    def seconds(self) -> float:
        """Of a micro-batch: collectives of weights and gradients hide behind operations; tokens wait for each other."""
        return max(self.operations + self.exchanged, self.ring)

    @property
    def bound(self) -> str:
        """What takes longest."""
        parts = {"operations": self.operations, "weights and gradients": self.ring, "tokens": self.exchanged}
        return max(parts, key=lambda name: parts[name])

    @property
    def tokens_per_s(self) -> float:
        """Of one rank, in steps of many micro-batches."""
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Share of the peak, without the operations of checkpointing."""
        return self.useful / self.seconds


def traffic_of(shape: ModelShape, settings: Settings, tokens: int) -> Traffic:
    """Work out a micro-batch of ``tokens`` on each rank.

    ZeRO 3 gathers the weights forward and backward, and sends gradients to their owners once; ZeRO 2 sums whole gradients in
    each micro-batch; ZeRO 1 and 0 in each step. A sum is twice a gather. Each expert's token travels there and back: in the
    forward pass, again if it is checkpointed, and in the backward pass. So do queries, keys, values and results between
    ranks that share rows; each of these needs a key head of its own.
    """
    learner = settings.learner
    ranks, size = learner.num_ranks * learner.num_nodes, BYTES[learner.dtype]
    stage = learner.stage_on(ranks, leaves_device=settings.run.colocate)
    whole = size * _ring(shape, ranks, learner.expert_parallel)
    passes = 2 + learner.activation_checkpointing
    share = learner.expert_parallel
    hops = 2 * passes * (1 - 1 / share)
    exchanged = hops * size * tokens * shape.experts_per_token * shape.hidden * shape.mixed_layers
    rows = learner.sequence_parallel
    heads = 2 * shape.heads + 2 * max(shape.kv_heads, rows)
    exchanged += passes * (1 - 1 / rows) * size * tokens * heads * shape.head_dim * shape.layers
    ring = {3: 3 * whole, 2: 2 * whole}.get(stage, 0.0)
    of_step = {3: 0.0, 2: whole, 1: 3 * whole}.get(stage, 4 / size * 2 * whole)
    return Traffic(ring=ring, exchanged=exchanged, ring_of_step=of_step)


def _ring(shape: ModelShape, ranks: int, expert_parallel: int) -> float:
    """Elements that a rank sends so that all have all; of the experts, those that it shares with its replicas."""
    replicas = ranks // expert_parallel
    experts = shape.expert_parameters / expert_parallel * (1 - 1 / replicas)
    return shape.other_parameters * (1 - 1 / ranks) + experts


def roofline(shape: ModelShape, settings: Settings, work: Work, device: Device) -> Roofline | None:
    """Work out a full micro-batch. None where the device's peak, bandwidth or links are not known."""
    learner = settings.learner
    if device.peak is None or device.bandwidth is None or device.link is None:
        return None
    tokens = learner.max_tokens_per_micro_batch
    traffic = traffic_of(shape, settings, tokens)
    ranks = learner.num_ranks * learner.num_nodes
    # Rings pass through all cards of a machine; neighbours on other machines are reached through one's own.
    ring_rate = device.link if learner.num_nodes == 1 else min(device.link, learner.num_ranks * NETWORK)
    together = max(learner.expert_parallel, learner.sequence_parallel)
    exchange_rate = device.link if together <= learner.num_ranks else NETWORK
    operations = flops_per_trained_token(shape, settings, work) * tokens / device.peak
    plain = settings.model_copy(update={"learner": learner.model_copy(update={"activation_checkpointing": False})})
    adam = ADAM_BYTES * shape.parameters / ranks / device.bandwidth
    return Roofline(
        operations=operations,
        ring=traffic.ring / ring_rate,
        exchanged=traffic.exchanged / exchange_rate,
        of_step=adam + traffic.ring_of_step / ring_rate,
        tokens=tokens,
        useful=flops_per_trained_token(shape, plain, work) * tokens / device.peak,
    )
