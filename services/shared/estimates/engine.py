"""Memory of one SGLang server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gspo_services.shared.estimates.amounts import BYTES, GIB, Span
from gspo_services.shared.estimates.shape import ModelShape
from gspo_services.shared.settings import Settings

STATIC_SHARE: Final = Span(0.80, 0.90)
"""Share of a GPU's memory for weights and KV cache if --mem-fraction-static is not given (SGLang 0.5 chooses by the GPU)."""
PROCESS_BYTES: Final = Span(0.9 * GIB, 1.4 * GIB)
"""Bytes of a server on a CPU, without weights and cache: measured at 0.97 GB."""
SHARE_OPTION: Final = "--mem-fraction-static"


@dataclass(frozen=True, kw_only=True)
class EngineMemory:
    """Bytes of one server: on each of its devices, or all on the host if it has none."""

    weights: float
    cache_bytes_per_token: int
    cache_tokens: Span
    """Tokens whose keys and values the server can hold at the same time."""
    total: Span

    def running(self, tokens: float) -> float:
        """Return how many sequences of ``tokens`` fit into the cache at the same time, at least."""
        return self.cache_tokens.low / tokens


def static_share(settings: Settings) -> float | None:
    """Return the --mem-fraction-static in rollout.server_args; None: missing or not a number."""
    arguments = settings.rollout.server_args
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == SHARE_OPTION:
            text = value if equals else next(iter(arguments[index + 1 :]), "")
            try:
                return float(text)
            except ValueError:
                return None
    return None


def engine_memory(shape: ModelShape, settings: Settings, device_bytes: float | None) -> EngineMemory:
    """Estimate. ``device_bytes``: of its GPU; None on a CPU, where rollout.max_total_tokens is the size of the cache.

    On a GPU weights and cache share --mem-fraction-static of the memory: the cache is what the weights leave. A token takes
    2 x layers x kv_heads x head_dim elements. Ranks that share a model have a part of its weights each, and of its heads.
    """
    rollout = settings.rollout
    tensor, copies = rollout.tensor_parallel, rollout.data_parallel
    size = BYTES[settings.model.dtype]
    weights = float(size * shape.parameters) / tensor
    per_token = shape.kv_bytes(size) // min(tensor, shape.kv_heads)
    if device_bytes is None:
        tokens = float(rollout.max_total_tokens)
        total = (PROCESS_BYTES + (weights + tokens * per_token)) * rollout.ranks_per_server
        held = Span(copies * tokens, copies * tokens)
        return EngineMemory(weights=weights, cache_bytes_per_token=per_token, cache_tokens=held, total=total)
    given = static_share(settings)
    share = STATIC_SHARE if given is None else Span(given, given)
    room = Span(max(0.0, share.low * device_bytes - weights), max(0.0, share.high * device_bytes - weights))
    return EngineMemory(
        weights=weights,
        cache_bytes_per_token=per_token,
        cache_tokens=room * (copies / per_token),
        total=Span(max(weights, share.low * device_bytes), max(weights, share.high * device_bytes)),
    )
