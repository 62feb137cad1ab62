"""Starts one real SGLang server for one model directory."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from gspo_services.rollout.sglang import Engine, EngineError, EngineServer, ServerError, ServerOptions, fail_when_dead
from gspo_services.runs.local_play import VERSION
from gspo_services.shared.placement import this_machine
from gspo_services.shared.runtime.errors import ConfigurationError, ended_by
from gspo_services.shared.runtime.log_files import LogLimits
from gspo_services.shared.settings import Settings, model_config
from gspo_services.shared.weights import ServedError, require_servable, spread_of


@asynccontextmanager
async def open_served(settings: Settings, directory: Path, name: str, vocab_size: int) -> AsyncIterator[Engine]:
    """Yield the client of a server of ``directory``, which ends with the context, or with this process.

    Raises: ConfigurationError when SGLang would not serve this model. ServiceError when the server does not start, or dies;
    its text has the end of the server's log.
    """
    rollout, run = settings.rollout, settings.run
    try:
        require_servable(model_config(directory), settings, device="cuda" if this_machine(os.environ).gpus else "cpu")
    except ServedError as error:
        raise ConfigurationError(f"{directory}: {error}") from error
    options = ServerOptions(
        model_path=directory,
        log_path=run.directory / "logs" / f"{name}-sglang.log",
        log_limits=LogLimits(max_bytes=run.log_bytes, most_files=run.log_files),
        dtype=settings.model.dtype,
        float32_head=settings.model.float32_head,
        weight_version=VERSION,
        max_total_tokens=rollout.max_total_tokens,
        max_running=rollout.max_running,
        spread=spread_of(settings),
        extra_args=tuple(rollout.server_args),
        start_timeout_s=rollout.start_timeout_s,
    )
    with ended_by(ServerError, EngineError):
        async with EngineServer(options) as server:
            engine = Engine(
                server.url,
                vocab_size=vocab_size,
                chunk_tokens=rollout.chunk_tokens,
                max_concurrency=rollout.max_running,
                stall_timeout_s=rollout.engine_timeout_s,
            )
            async with engine, asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(fail_when_dead(server), name="watch-server")
                try:
                    yield engine
                finally:
                    watch.cancel()
