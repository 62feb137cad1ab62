"""Wiring of the broker process: settings -> parts -> run."""

import asyncio
import uuid
from datetime import UTC, datetime
from typing import Final

import structlog
import zmq.asyncio
from prometheus_client import CollectorRegistry

from gspo.environments import TaskSource
from protocol.channels import BATCH, WORK
from protocol.limits import MAX_FRAME_BYTES, MAX_HEADER_BYTES, MAX_TRAJECTORIES_PER_BATCH
from services.broker.ledger import Ledger, LedgerConfig
from services.broker.metrics import BrokerMetrics
from services.broker.metrics_file import METRICS_FILE, MetricsFile
from services.broker.quotas import MIN_PATIENCE_S
from services.broker.retention import Retention
from services.broker.service import BrokerService
from services.broker.store import LEDGER_FILE, Store, StoreMismatch, StoreUnavailable
from services.broker.upkeep import Upkeep
from services.environments import create_environment, create_task_set
from services.runtime.clock import Clock, MonotonicClock
from services.runtime.errors import ConfigurationError
from services.runtime.net import Authenticator, RouterChannel, Security
from services.runtime.settings import Settings, run_fingerprint, write_run_settings
from services.runtime.telemetry import Health, TelemetryServer

log = structlog.get_logger()

MAX_QUIET_S: Final = 30.0
TOKEN_BYTES: Final = 4


async def run_broker(settings: Settings, stop: asyncio.Event) -> None:
    """Serve the run in ``run.directory`` until ``stop`` is set.

    Raises: ConfigurationError, EndpointError, ServiceError; each names the value and the way out.
    """
    _check_batch_fits(settings)
    tasks = tasks_of(settings)
    security = Security.load(settings.security, "broker")
    directory = settings.run.directory
    clock = MonotonicClock()
    health = Health(clock, MAX_QUIET_S)
    registry = CollectorRegistry()
    metrics = BrokerMetrics(registry)
    metrics.watch_disk(directory)
    fingerprint = run_fingerprint(settings)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        metrics_file = MetricsFile(directory / METRICS_FILE)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(f"run.directory is {directory}: cannot be used: {error}") from error
    with (
        _open_store(settings, fingerprint) as store,
        TelemetryServer(settings.security.metrics_host, settings.broker.metrics_port, registry, health) as telemetry,
    ):
        _write_settings(settings)
        config = ledger_config(settings, tasks, store.run_id, fingerprint)
        ledger = Ledger(config, store.contents(), clock.now())
        context = zmq.asyncio.Context()
        authenticator = Authenticator(context, security, clock, metrics.authenticator_counters)
        try:
            largest = MAX_HEADER_BYTES + 2 * TOKEN_BYTES * settings.sampling.episode_tokens
            work = RouterChannel(context, WORK, settings.broker.work_endpoint, authenticator, max_message_bytes=largest)
            batch = RouterChannel(context, BATCH, settings.broker.batch_endpoint, authenticator)
            broker = BrokerService(
                ledger,
                store,
                {WORK: work, BATCH: batch},
                tasks,
                metrics_file,
                metrics,
                health,
                clock,
                lambda: datetime.now(tz=UTC).timestamp(),
                commit_interval_s=settings.broker.commit_interval_s,
                temperature=settings.sampling.temperature,
                retention=retention_of(settings, metrics, clock),
            )
            log.info(
                "broker_started",
                run_id=store.run_id,
                fingerprint=fingerprint,
                directory=str(directory),
                work_endpoint=work.endpoint,
                batch_endpoint=batch.endpoint,
                metrics_port=telemetry.port,
                next_batch=ledger.state.batches.num_assembled,
                policy_version=ledger.state.batches.newest_version,
                open_groups=ledger.state.groups.num_training,
                stopping=ledger.state.stop_reason,
                keys=security.own is not None,
            )
            upkeep = Upkeep(store, metrics, clock, lambda: datetime.now(tz=UTC).timestamp())
            await _serve(broker, authenticator, upkeep, stop)
        finally:
            authenticator.close()
            context.destroy()
    log.info("broker_stopped")


async def _serve(broker: BrokerService, authenticator: Authenticator, upkeep: Upkeep, stop: asyncio.Event) -> None:
    async with asyncio.TaskGroup() as tasks:
        beside = [
            tasks.create_task(authenticator.run(), name="authenticator"),
            tasks.create_task(upkeep.run(), name="upkeep"),
        ]
        try:
            await broker.run(stop)
        finally:
            for task in beside:
                task.cancel()


def retention_of(settings: Settings, metrics: BrokerMetrics, clock: Clock) -> Retention:
    """What moves old tokens into archive files, from the settings."""
    return Retention(
        settings.run.directory / LEDGER_FILE,
        metrics,
        clock,
        keep_batches=settings.broker.keep_batches,
        file_bytes=int(settings.broker.archive_file_mib * 2**20),
    )


def ledger_config(settings: Settings, tasks: dict[str, TaskSource], run_id: str, fingerprint: str) -> LedgerConfig:
    """The ledger's rules, from the settings."""
    num_eval_tasks = tasks["eval"].num_tasks
    wanted = settings.evaluation.num_tasks
    return LedgerConfig(
        run_id=run_id,
        fingerprint=fingerprint,
        seed=settings.run.seed,
        num_batches=settings.run.num_batches,
        group_size=settings.batch.group_size,
        groups_per_batch=settings.batch.groups_per_batch,
        max_lag=settings.batch.max_lag,
        max_tokens=settings.sampling.max_tokens,
        max_episode_tokens=settings.sampling.episode_tokens,
        lease_s=settings.broker.lease_s,
        idle_lease_s=settings.broker.idle_lease_s,
        max_attempts=settings.broker.max_attempts,
        failure_budget=settings.broker.failure_budget,
        evaluate_every_batches=settings.evaluation.every_batches,
        num_eval_tasks=wanted if num_eval_tasks is None else min(wanted, num_eval_tasks),
        num_train_tasks=tasks["train"].num_tasks,
        # An agent may be busy without us until its deadline.
        min_patience_s=max(MIN_PATIENCE_S, settings.agent.deadline_s if settings.agent.is_used else 0.0),
    )


def tasks_of(settings: Settings) -> dict[str, TaskSource]:
    """The tasks of both splits. Raises: ConfigurationError when the environment cannot give them."""
    create = create_task_set if settings.agent.is_used else create_environment
    try:
        source = create(settings.environment.name, settings.environment.options)
        tasks = {"train": source.tasks("train"), "eval": source.tasks("eval")}
    except (ValueError, OSError) as error:
        raise ConfigurationError(f"environment: {error}") from error
    if tasks["train"].num_tasks == 0:
        raise ConfigurationError(f"environment {settings.environment.name!r} has no training tasks: check its options")
    return tasks


def _open_store(settings: Settings, fingerprint: str) -> Store:
    try:
        return Store(settings.run.directory / LEDGER_FILE, fingerprint=fingerprint, run_id=uuid.uuid4().hex[:12])
    except (StoreMismatch, StoreUnavailable) as error:
        raise ConfigurationError(f"run.directory is {settings.run.directory}: {error}") from error


def _write_settings(settings: Settings) -> None:
    """Write the settings once the ledger has accepted them, so that a refused directory stays as it is."""
    try:
        write_run_settings(settings)
    except OSError as error:
        raise ConfigurationError(f"run.directory is {settings.run.directory}: cannot be used: {error}") from error


def _check_batch_fits(settings: Settings) -> None:
    """A batch travels as one message, so its longest possible form must fit one. Turns fit by their own limit
    (``protocol.limits.trajectory_limits``).
    """
    num_trajectories = settings.batch.groups_per_batch * settings.batch.group_size
    if num_trajectories > MAX_TRAJECTORIES_PER_BATCH:
        raise ConfigurationError(
            f"batch.groups_per_batch * batch.group_size is {num_trajectories}: {MAX_TRAJECTORIES_PER_BATCH} allowed"
        )
    sampling = settings.sampling
    num_bytes = num_trajectories * sampling.episode_tokens * TOKEN_BYTES
    if num_bytes > MAX_FRAME_BYTES:
        name = "max_tokens" if sampling.max_episode_tokens is None else "max_episode_tokens"
        raise ConfigurationError(
            f"a batch of {num_trajectories} trajectories of sampling.{name} = {sampling.episode_tokens} could have "
            f"{num_bytes} bytes of token ids, {MAX_FRAME_BYTES} fit a message: use smaller batches or shorter trajectories"
        )
