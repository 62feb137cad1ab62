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
    try:
        logprobs = await engine.probed(probe)
    except EngineError as error:
        if "vocab" not in str(error):
            raise
        raise ConfigurationError(
            f"the server at {engine.url} is not the learner's policy, and nothing was sampled: it has no token "
            f"{probe.vocabulary - 2}, and the learner's model has {probe.vocabulary}: {error}"
        ) from error
    try:
        found = disagreement(
            logprobs,
            probe,
            dtype=info.dtype,
            device=info.device,
            quantised_cache=info.kv_cache_dtype not in ("auto", info.dtype),
            config=await asyncio.to_thread(_config, Path(info.model_path)),
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
