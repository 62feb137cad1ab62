"""Compares an engine with the learner before it may generate: its parameters are the learner's, but are they used alike?

Checksums say nothing about a configuration: another rope, window or epsilon computes another policy from the same weights.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog

from gspo.model_files.configuration import read_config
from gspo_protocol.messages import Probe
from gspo_services.rollout.sglang import Engine, EngineError
from gspo_services.shared.agreement import disagreement
from gspo_services.shared.runtime.errors import ConfigurationError

log = structlog.get_logger()


async def require_same_policy(engine: Engine, probe: Probe) -> None:
    """Raises: ConfigurationError that says what differs; EngineError."""
    info = await engine.server_info()
    config = await asyncio.to_thread(_config, Path(info.model_path))
    tokens = probe.vocabulary if config is None else config.get("vocab_size", probe.vocabulary)
    try:
        # A token outside its vocabulary ends a server.
        found = f"it has {tokens} tokens, the learner's model {probe.vocabulary}" if tokens < probe.vocabulary else ""
        found = found or disagreement(
            await engine.probed(probe),
            probe,
            dtype=info.dtype,
            device=info.device,
            quantised_cache=info.kv_cache_dtype not in ("auto", info.dtype),
            config=config,
        )
    except ValueError as error:
        raise EngineError(f"the probe cannot be compared: {error}") from error
    if found:
        raise ConfigurationError(f"the server at {engine.url} is not the learner's policy, and nothing was sampled: {found}")
    log.info("engine_compared", probe_tokens=probe.num_tokens)


def _config(directory: Path) -> Mapping[str, Any] | None:
    """Of the server's model; None: it is not on this machine."""
    try:
        return read_config(directory)
    except ValueError:
        return None
