"""``gspo serve CONFIG``: wiring of the service: its table, the learner's thread, one SGLang server, HTTP."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing, asynccontextmanager, closing
from functools import partial
from typing import Final

import structlog

from gspo.model_files.configuration import read_config
from gspo_services.learner.start import position_limit
from gspo_services.rollout.sglang import Engine, EngineHttp, EngineServer, ServerError, ServerOptions, fail_when_dead
from gspo_services.rollout.tokenizer import ChatTokenizer, TokenizerError
from gspo_services.rollout.weights import lora_arguments
from gspo_services.serve.execution import Execution
from gspo_services.serve.routes import ClientRoutes, ServedModel
from gspo_services.serve.samples import SampleFutures
from gspo_services.serve.sampling import AdapterSlots, Sampler
from gspo_services.serve.table import CallTable
from gspo_services.serve.wire import CallLimits
from gspo_services.shared.runtime.errors import ConfigurationError, ServiceError, exit_status
from gspo_services.shared.runtime.http_listener import listen
from gspo_services.shared.runtime.lifecycle import leave, run_until_stopped
from gspo_services.shared.runtime.logs import configure_logging
from gspo_services.shared.runtime.operations import only_operation
from gspo_services.shared.settings import Settings, is_private, parse_process_arguments, require_model

log = structlog.get_logger()

KEY_VARIABLE: Final = "GSPO_SERVE_KEY"
FOLDER: Final = "serve"
"""Below run.directory."""
MAX_CONNECTIONS: Final = 4096


def main() -> int:
    """Serve clients until SIGTERM. Returns the exit status."""
    configure_logging("serve")
    return exit_status(_run)


def _run() -> None:
    arguments = parse_process_arguments(
        "gspo serve",
        "Serve clients of Tinker's API: they train adapters of model.path and sample from them. Set lora.rank, the largest "
        "rank of a client.",
        default_name="serve",
    )
    settings = arguments.settings
    require_model(settings.model.path)
    key = os.environ.get(KEY_VARIABLE, "")
    _require_servable(settings, key)
    run_until_stopped(partial(serve, settings, key))


def _require_servable(settings: Settings, key: str) -> None:
    """Raises: ConfigurationError."""
    host, lora = settings.serve.host, settings.lora
    reached = is_private(f"http://[{host}]:1" if ":" in host else f"http://{host}:1")
    if not (key or settings.security.allow_plaintext or reached):
        raise ConfigurationError(
            f"serve.host is {host!r}: other hosts can reach that; set the variable {KEY_VARIABLE}, which clients have as "
            "TINKER_API_KEY, or security.allow_plaintext = true where nobody else reaches it"
        )
    if key and (not key.startswith("tml-") or len(key) < 20 or not key.isascii() or not key.isprintable() or " " in key):
        raise ConfigurationError(
            f"{KEY_VARIABLE} must be tml- and 16 or more printable ASCII characters without spaces, as the client wants"
        )
    if not lora.is_used or lora.target_modules != ["attention"]:
        raise ConfigurationError(
            f"lora.rank is {lora.rank} and lora.target_modules {lora.target_modules}: clients train adapters of attention; "
            'set lora.rank to the largest rank of a client, and target_modules = ["attention"]'
        )


async def serve(settings: Settings, key: str, stop: asyncio.Event) -> None:
    """Serve until ``stop``. Raises: ConfigurationError, EndpointError, ServiceError, which name the remedy."""
    # torch and DeepSpeed take seconds to import, so the configuration was checked first.
    from gspo_services.serve.training import open_client_models

    directory = (settings.run.directory / FOLDER).resolve()
    try:
        tokenizer = ChatTokenizer(settings.model.path)
    except TokenizerError as error:
        raise ConfigurationError(str(error)) from error
    longest = min(position_limit(read_config(settings.model.path)) or sys.maxsize, settings.rollout.max_total_tokens)
    model = ServedModel(
        names=tuple(settings.serve.names) or (settings.model.path.resolve().name,), path=settings.model.path, longest=longest
    )
    limits = CallLimits(vocabulary=tokenizer.vocab_size, longest=longest)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer") as trainer, ExitStack() as stack:
        way_out = "stop it, or give this one another run.directory"
        stack.enter_context(only_operation(directory, "serve", way_out, inside=True))
        table = stack.enter_context(closing(CallTable(directory / "calls.sqlite")))
        models = await asyncio.get_running_loop().run_in_executor(trainer, open_client_models, settings)
        stack.callback(lambda: trainer.submit(models.close).result())
        execution = Execution(table, models, trainer, directory=directory, names=model.names, limits=limits)
        await asyncio.to_thread(execution.line_up)
        try:
            async with _engine(settings) as engine:
                await _answer_clients(settings, engine, execution, table, tokenizer, model, limits, key, stop)
        except ServerError as error:
            raise ServiceError(str(error)) from error


@asynccontextmanager
async def _engine(settings: Settings) -> AsyncIterator[EngineServer]:
    """An SGLang server that holds adapters of any rank up to lora.rank."""
    rollout = settings.rollout
    options = ServerOptions(
        model_path=settings.model.path,
        log_path=settings.run.directory / "logs" / "serve-sglang.log",
        dtype=settings.model.dtype,
        float32_head=settings.model.float32_head,
        port=rollout.server_port,
        max_total_tokens=rollout.max_total_tokens,
        max_running=rollout.max_running,
        lora_args=tuple(lora_arguments(settings.lora.rank, settings.lora.max_loaded_loras)),
        extra_args=tuple(rollout.server_args),
        start_timeout_s=rollout.start_timeout_s,
    )
    async with EngineServer(options) as server:
        yield server


async def _answer_clients(
    settings: Settings,
    server: EngineServer,
    execution: Execution,
    table: CallTable,
    tokenizer: ChatTokenizer,
    model: ServedModel,
    limits: CallLimits,
    key: str,
    stop: asyncio.Event,
) -> None:
    rollout = settings.rollout
    http = EngineHttp(server.url, timeout_s=rollout.engine_timeout_s, stall_timeout_s=rollout.engine_timeout_s)
    async with aclosing(http), Engine(server.url, load_timeout_s=rollout.engine_timeout_s) as engine:
        slots = AdapterSlots(engine.adapters, settings.lora.max_loaded_loras)
        sampler = Sampler(http, slots, tokenizer, longest=model.longest, max_running=rollout.max_running)
        async with asyncio.TaskGroup() as tasks:
            working = tasks.create_task(_work(execution, server), name="work")
            routes = ClientRoutes(
                table, execution, sampler, SampleFutures(tasks),
                model=model, limits=limits, directory=settings.run.directory / FOLDER, key=key,
            )  # fmt: skip
            application = routes.application()
            application.freeze()
            runner = await listen(
                application._handle, settings.serve.host, settings.serve.port, MAX_CONNECTIONS, application=application
            )
            try:
                host, port = runner.addresses[0][:2]
                log.info("serve_started", host=host, port=port, model=model.names[0], key=bool(key))
                await stop.wait()
            finally:
                await runner.cleanup()
                working.cancel()


async def _work(execution: Execution, server: EngineServer) -> None:
    """Execute calls until cancelled. Raises: ServiceError, also when the SGLang server dies."""
    async with asyncio.TaskGroup() as own:
        own.create_task(execution.run(), name="execution")
        own.create_task(fail_when_dead(server), name="server")


if __name__ == "__main__":
    leave(main())
