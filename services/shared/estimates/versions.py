"""Estimates how long a policy version takes, from the end of a batch until every engine serves it."""

from __future__ import annotations

from typing import Final

from gspo_services.shared.estimates.amounts import BYTES, Span
from gspo_services.shared.estimates.shape import ModelShape
from gspo_services.shared.settings import Settings

MIB: Final = 2.0**20
COPY: Final = Span(1.0e9, 9.0e9)
"""Bytes a second from a rank's tensors into the host's memory: 0.11 CPU s a GB on a loaded machine."""
HASH: Final = Span(2.0e9, 5.0e9)
"""Bytes a second and core of the sums of tiles: 0.18 to 0.21 CPU s a GB (docs/evidence/performance.md)."""
ENCODE: Final = Span(0.4e9, 2.0e9)
"""Bytes a second and core of comparing two versions and encoding what differs: 0.4 to 0.6 CPU s a GB at 1 %
changed, 1.2 to 1.4 at 7 %."""
ENCODING_CORES: Final = 4
"""More do not help one rank: they wait for each other."""
CHECK: Final = Span(0.5e9, 2.0e9)
"""Bytes a second and core of a rollout that applies a version and writes its changes for the engine: 0.4 to 1.2 CPU s a GB
at 1 % changed."""
NETWORK: Final = Span(0.4e9, 1.6e9)
"""Bytes a second that a rank sends to all rollouts."""
WRITE_AND_LOAD: Final = Span(0.4e9, 1.5e9)
"""Bytes a second that an engine loads."""
DELTA_SHARE: Final = {True: 0.05, False: 1.0}
"""Share of the bytes that are sent: bfloat16 at 1e-6 changes 1 %, at 1e-5 7 %. Float32 changes almost everywhere."""
FIXED_S: Final = Span(0.05, 0.5)
"""Seconds for messages, the pause, and SGLang's answers."""


def version_span(shape: ModelShape, settings: Settings, *, cores: int, num_rollouts: int) -> Span:
    """Estimate seconds, from rates measured on 2 cores without a GPU; engines' loads on GPUs are assumed.

    Copy, sums and delta come one after the other on each rank, for its part; then transfer from all ranks, and checks and
    load on each rollout. ``cores``: of each of the learner's machines, and of each rollout.
    """
    learner = settings.learner
    # Weights that adapters change are on rank 0 alone.
    machines, ranks = (1, 1) if settings.lora.is_used else (learner.num_nodes, learner.num_ranks * learner.num_nodes)
    size = float(BYTES[settings.model.dtype] * shape.parameters)
    sent = size * DELTA_SHARE[settings.model.dtype == "bfloat16"]
    fan_out = 2 if settings.rollout.peer_weights_endpoint else max(1, num_rollouts)
    parts = (
        (size / ranks, COPY),
        (size / (cores * machines), HASH),
        (size / machines, ENCODE * min(cores, ENCODING_CORES * ranks // machines)),
        (sent * fan_out / ranks, NETWORK),
        (size / cores, CHECK),
        (sent, WRITE_AND_LOAD),
    )
    total = FIXED_S
    for num_bytes, rate in parts:
        total = total + Span(num_bytes, num_bytes).divided_by(rate)
    return total
