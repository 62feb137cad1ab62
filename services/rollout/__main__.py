"""``gspo rollout CONFIG`` wires one rollout: SGLang server, engine client, environment loop, weight sync."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, closing
from datetime import UTC, datetime
from functools import partial
from typing import Final, Literal, NoReturn

import structlog
import zmq.asyncio
from prometheus_client import CollectorRegistry

from gspo_protocol.sessions import new_session
from gspo_services.rollout.broker import open_broker
from gspo_services.rollout.colocate import TimeSharing
from gspo_services.rollout.metrics import RolloutMetrics
from gspo_services.rollout.opening import Policy, group_rewards, open_all_episodes, open_comparing, open_user_code
from gspo_services.rollout.service import RolloutService
from gspo_services.rollout.sglang import (
    Engine,
    EngineError,
    EngineMetrics,
    EngineServer,
    RoutedExperts,
    ServerError,
    ServerOptions,
    ServerStartError,
    fail_when_dead,
    fail_when_deaf,
)
from gspo_services.rollout.tokenizer import ChatTokenizer, TokenizerError
from gspo_services.rollout.weights import (
    AdapterPlan,
    EngineDevice,
    WeightPeers,
    WeightSync,
    lora_arguments,
    taken,
    weights_directory,
)
from gspo_services.shared.colocate import LOCK_FILE, DeviceLock
from gspo_services.shared.net import Security
from gspo_services.shared.placement import require_driver, require_kernels, this_machine
from gspo_services.shared.runtime.clock import Clock, MonotonicClock
from gspo_services.shared.runtime.errors import ConfigurationError, ServiceError, UnprovenError, exit_status
from gspo_services.shared.runtime.lifecycle import run_until_stopped, until_stopped
from gspo_services.shared.runtime.log_files import LogLimits
from gspo_services.shared.runtime.logs import configure_logging
from gspo_services.shared.runtime.stray_processes import kill_orphans
from gspo_services.shared.runtime.telemetry import Health, TelemetryServer
from gspo_services.shared.settings import ProcessArguments, Settings, model_config, parse_process_arguments
from gspo_services.shared.weights import (
    SpreadError,
    kv_heads,
    require_servable,
    require_spread,
    spread_of,
)

log = structlog.get_logger()

MAX_QUIET_S: Final = 120.0
BEAT_S: Final = 1.0
COMPLETE: Final = "run complete"


def main() -> int:
    """Run one rollout until SIGTERM or the end of the run. Returns the exit status."""
    configure_logging("rollout")
    return exit_status(_run)


def _run() -> None:
    arguments = parse_process_arguments(
        "gspo rollout",
        "Sample: leases in, trajectories out (SGLang and its episodes). `gspo generate --help` says how to generate without "
        "a learner.",
        default_name="rollout-0",
    )
    run_until_stopped(partial(run_rollout, arguments))


async def run_rollout(arguments: ProcessArguments, stop: asyncio.Event, clock: Clock | None = None) -> None:
    """Start SGLang (or use the one at server_url) and work for the broker until ``stop``. ``clock``: None: the machine's.

    Raises: a group of ConfigurationError, EndpointError, ServiceError, which name the remedy.
    """
    started = asyncio.Event()
    clock = MonotonicClock() if clock is None else clock
    health = Health(clock, MAX_QUIET_S)
    async with asyncio.TaskGroup() as tasks:
        working = tasks.create_task(_work(arguments, stop, started, clock, health), name="rollout")
        beside = [
            tasks.create_task(_cancel_the_start(working, stop, started), name="stop-while-starting"),
            tasks.create_task(_beat_while_starting(health, started), name="beat-while-starting"),
        ]
        await asyncio.wait([working])
        for task in beside:
            task.cancel()


async def _cancel_the_start(working: asyncio.Task[None], stop: asyncio.Event, started: asyncio.Event) -> None:
    """Cancel a start that ``stop`` interrupts: SGLang takes a minute, and the rollout holds no leases yet."""
    await stop.wait()
    if not started.is_set():
        working.cancel("stopped while starting")


async def _beat_while_starting(health: Health, started: asyncio.Event) -> None:
    """Report liveness during the start: a model may load for minutes (rollout.start_timeout_s)."""
    while not await until_stopped(started, BEAT_S):
        health.beat()


async def _work(
    arguments: ProcessArguments, stop: asyncio.Event, started: asyncio.Event, clock: Clock, health: Health
) -> None:
    settings, registry = arguments.settings, CollectorRegistry()
    with TelemetryServer(settings.security.metrics_host, settings.rollout.metrics_port, registry, health):
        is_complete = await _generate(arguments, stop, started, clock, health, registry)
        if is_complete and settings.rollout.linger:
            log.info("run_complete", lingers=True)
            health.not_ready(COMPLETE)
            while not await until_stopped(stop, BEAT_S):
                health.beat()


async def _generate(
    arguments: ProcessArguments,
    stop: asyncio.Event,
    started: asyncio.Event,
    clock: Clock,
    health: Health,
    registry: CollectorRegistry,
) -> bool:
    """Open everything and serve until ``stop`` or the end of the run. Returns whether the run is complete."""
    settings, metrics = arguments.settings, RolloutMetrics(registry)
    if num_strays := await asyncio.to_thread(kill_orphans):
        log.warning("strays_ended", number=num_strays, meaning="processes that a killed rollout's agents or rewards left")
    try:
        tokenizer = ChatTokenizer(
            settings.model.path,
            settings.model.template_arguments,
            show_special_tokens=settings.model.show_special_tokens,
        )
    except TokenizerError as error:
        raise ConfigurationError(str(error)) from error
    security = Security.load(settings.security, "rollout", arguments.name)
    context = zmq.asyncio.Context()
    try:
        async with AsyncExitStack() as stack:
            # Before SGLang, which takes a minute: a mistake in the user's code shows at once.
            player = await stack.enter_async_context(open_user_code(settings, arguments.name, metrics))
            comparing = await stack.enter_async_context(open_comparing(settings, player, metrics))
            lock = await stack.enter_async_context(_first_hold(settings, arguments.name, clock, metrics))
            engine = await stack.enter_async_context(_engine(settings, arguments.name, tokenizer.vocab_size, registry, lock))
            broker = stack.enter_context(open_broker(settings, context, name=arguments.name, clock=clock, security=security))
            directory = stack.enter_context(weights_directory(settings, arguments.name))
            weight_peers = None
            if settings.rollout.peer_weights_endpoint:
                weight_peers = WeightPeers(
                    context, settings.rollout.peer_weights_endpoint,
                    peer=arguments.name, session=new_session(), clock=clock, metrics=metrics, security=security,
                    directory=directory,
                )  # fmt: skip
                stack.callback(weight_peers.close)
            sync = WeightSync(
                context=context,
                engine=engine,
                work_directory=directory,
                pause_mode=settings.rollout.pause_mode,
                peer=arguments.name,
                session=new_session(),
                clock=clock,
                metrics=metrics,
                security=security,
                weight_peers=weight_peers,
                kv_heads=await _shared(settings, engine),
                adapters=AdapterPlan.of(settings),
                device=EngineDevice(engine, lock, clock=clock, metrics=metrics),
            )
            policy = Policy(
                tokenizer=tokenizer, engine=engine, broker=broker, may_generate=sync.may_generate, metrics=metrics,
                clock=clock, wall_s=lambda: datetime.now(tz=UTC).timestamp(),
            )  # fmt: skip
            episodes = await stack.enter_async_context(open_all_episodes(settings, arguments.name, policy, player, registry))
            service = RolloutService(
                episodes=episodes,
                broker=broker,
                sync=sync,
                settings=settings.rollout,
                clock=clock,
                health=health,
                metrics=metrics,
                sharing=None if lock is None else TimeSharing(sync),
                groups=group_rewards(settings, policy, comparing),
                run_began=tokenizer.run_began,
            )
            started.set()
            health.opened()
            return await service.run(stop)
    except ServerStartError as error:
        # The same error twice in a row is the settings' or the installation's: to start again for ever helps nobody.
        raise UnprovenError(str(error)) from error
    except (ServerError, EngineError) as error:
        raise ServiceError(str(error)) from error
    finally:
        context.destroy(linger=1000)


async def _shared(settings: Settings, engine: Engine) -> int:
    """Return the number of key-value heads of a model that is sharded over ranks; 1 for an unsharded one.

    Raises: ConfigurationError when its weights could not be verified, or its head rounds logits that the learner does not.
    EngineError.
    """
    info = await engine.server_info()
    if settings.model.float32_head and info.enable_fp32_lm_head is False:
        raise ConfigurationError(
            "model.float32_head is true and the SGLang server rounds its logits: start it with --enable-fp32-lm-head, or "
            "set model.float32_head = false"
        )
    try:
        info.require_learners_policy()
        spread = info.spread
        if spread.is_whole:
            return 1
        config = model_config(settings.model.path)
        require_spread(config, spread)
        return kv_heads(config)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error


def _require_served(settings: Settings) -> None:
    """Check that SGLang serves the model of config.json. Raises: ConfigurationError.

    A server started by someone else may have a model of which only the tokenizer is here.
    """
    if settings.rollout.server_url and not (settings.model.path / "config.json").is_file():
        return
    device: Literal["cpu", "cuda"] = "cuda" if this_machine(os.environ).gpus else "cpu"
    try:
        require_servable(model_config(settings.model.path), settings, device=None if settings.rollout.server_url else device)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error


def _routed(settings: Settings) -> RoutedExperts | None:
    """What the engine reports of its experts; None: nothing is asked for. Raises: ConfigurationError."""
    if settings.objective.routing_replay_from != "engine":
        return None
    try:
        return RoutedExperts.of(model_config(settings.model.path))
    except ValueError as error:
        raise ConfigurationError(f"objective.routing_replay_from: {error}") from error


@asynccontextmanager
async def _first_hold(
    settings: Settings, name: str, clock: Clock, metrics: RolloutMetrics
) -> AsyncIterator[DeviceLock | None]:
    """The lock of the engine's device, in hand, because a server takes memory when it starts; None: nobody shares it."""
    if not settings.run.colocate:
        yield None
        return
    with closing(DeviceLock(settings.run.directory / LOCK_FILE, name)) as lock:
        yield await taken(lock, clock, metrics)


def server_options(settings: Settings, name: str, lock: DeviceLock | None = None) -> ServerOptions:
    """The options of the SGLang server that the rollout of this name starts. ``lock``: of the device on which it does."""
    rollout, replays_engine = settings.rollout, settings.objective.routing_replay_from == "engine"
    plan = AdapterPlan.of(settings)
    return ServerOptions(
        model_path=settings.model.path,
        log_path=settings.run.directory / "logs" / f"{name}-sglang.log",
        log_limits=LogLimits(max_bytes=settings.run.log_bytes, most_files=settings.run.log_files),
        dtype=settings.model.dtype,
        float32_head=settings.model.float32_head,
        port=rollout.server_port,
        max_total_tokens=rollout.max_total_tokens,
        max_running=rollout.max_running,
        longest_tokens=settings.longest_sequence,
        spread=spread_of(settings),
        lora_args=() if plan is None else tuple(lora_arguments(plan.rank, plan.num_loaded)),
        extra_args=(*(["--enable-return-routed-experts"] if replays_engine else []), *rollout.server_args),
        start_timeout_s=rollout.start_timeout_s,
        colocated=lock is not None,
        kept_open=None if lock is None else lock.fileno(),
    )


@asynccontextmanager
async def _engine(
    settings: Settings, name: str, vocab_size: int, registry: CollectorRegistry, lock: DeviceLock | None = None
) -> AsyncIterator[Engine]:
    """Yield a client of the server at server_url, or of one started here that ends with this process.

    The server's metrics are in ``registry`` from then on.
    """
    rollout = settings.rollout
    _require_served(settings)
    client = partial(
        Engine,
        vocab_size=vocab_size,
        chunk_tokens=rollout.chunk_tokens,
        max_concurrency=rollout.max_running,
        load_timeout_s=rollout.engine_timeout_s,
        stall_timeout_s=rollout.engine_timeout_s,
        routed=_routed(settings),
    )
    if rollout.server_url:
        registry.register(EngineMetrics(rollout.server_url))
        async with client(rollout.server_url) as engine, _watched(fail_when_deaf(rollout.server_url)):
            yield engine
        return
    if not spread_of(settings).is_whole:
        # Before a server is started, which takes a minute.
        try:
            require_spread(model_config(settings.model.path), spread_of(settings))
        except SpreadError as error:
            raise ConfigurationError(str(error)) from error
    require_driver()
    require_kernels()
    async with EngineServer(server_options(settings, name, lock)) as server:
        registry.register(EngineMetrics(server.url))
        async with client(server.url) as engine, _watched(fail_when_dead(server), fail_when_deaf(server.url)):
            yield engine


@asynccontextmanager
async def _watched(*watches: Coroutine[None, None, NoReturn]) -> AsyncIterator[None]:
    """Run ``watches`` beside the body of the context; an error of one ends the body."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(watch, name="watch-server") for watch in watches]
        try:
            yield
        finally:
            for watch in running:
                watch.cancel()


if __name__ == "__main__":
    sys.exit(main())
