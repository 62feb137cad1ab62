"""Wiring of the broker process: settings -> parts -> run."""

import asyncio
import math
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import structlog
import zmq.asyncio
from prometheus_client import CollectorRegistry

from gspo.tasks.environments import TaskSource
from gspo.tasks.ladders import LadderTasks
from gspo_protocol.channels import BATCH, WORK
from gspo_protocol.limits import MAX_BATCH_TOKENS, MAX_CHUNK_FRAME_BYTES, MAX_HEADER_BYTES, MAX_TRAJECTORIES_PER_BATCH
from gspo_services.broker.evaluation_sets import open_sets
from gspo_services.broker.ledger import Ledger, LedgerConfig, SamplingRules, SetTerms, SourceShare
from gspo_services.broker.metrics import BrokerMetrics
from gspo_services.broker.metrics_file import METRICS_FILE, MetricsFile
from gspo_services.broker.quotas import MIN_PATIENCE_S
from gspo_services.broker.refresh import Refresh, read_additions
from gspo_services.broker.retention import Retention
from gspo_services.broker.rows import LedgerContents
from gspo_services.broker.service import BrokerService
from gspo_services.broker.store import (
    LEDGER_FILE,
    MARK_FILE,
    Store,
    StoreMismatch,
    StoreUnavailable,
    lock_holder,
    read_mark,
)
from gspo_services.broker.task_adapters import TaskAdapters
from gspo_services.broker.upkeep import Upkeep
from gspo_services.shared.learning import counted_components
from gspo_services.shared.net import Authenticator, RouterChannel, Security
from gspo_services.shared.runtime.clock import Clock, MonotonicClock
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.runtime.telemetry import Health, TelemetryServer
from gspo_services.shared.schedules import RunSchedules
from gspo_services.shared.settings import (
    Settings,
    read_run_settings,
    run_fingerprint,
    several_brokers_in,
    write_run_settings,
)
from gspo_services.tasks.environments import MixedTasks, create_environment, create_task_set

if TYPE_CHECKING:
    from gspo_services.broker.standby import Leading

log = structlog.get_logger()

MAX_QUIET_S: Final = 30.0
TOKEN_BYTES: Final = 4
RECALLED_LINES: Final = 256
"""Lines from before a start that say whether the run learns."""


async def run_broker(settings: Settings, stop: asyncio.Event) -> None:
    """Serve the run in ``run.directory`` until ``stop`` is set.

    Raises: ConfigurationError, EndpointError, ServiceError; each names the value and what to do.
    """
    if reason := several_brokers_in(settings.run.directory):
        raise ConfigurationError(f"run.directory: {reason}")
    require_batch_fits(settings)
    tasks = tasks_of(settings)
    set_tasks, sets = open_sets(settings)
    adapters = TaskAdapters(settings.lora.adapters, settings.lora.adapter_field, {**tasks, **set_tasks})
    adapters.require()
    security = Security.load(settings.security, "broker")
    directory = settings.run.directory
    clock = MonotonicClock()
    health = Health(clock, MAX_QUIET_S)
    registry = CollectorRegistry()
    metrics = BrokerMetrics(registry, counted_components(settings.environment.options, settings.reward.group_weights))
    metrics.watch_disk(directory)
    fingerprint = run_fingerprint(settings)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        metrics_file = MetricsFile(directory / METRICS_FILE)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(f"run.directory: {directory} cannot be used: {error}") from error

    def page() -> TelemetryServer:
        return TelemetryServer(settings.security.metrics_host, settings.broker.metrics_port, registry, health)

    async with _opened(settings, fingerprint, registry, page, health, clock, stop) as opened:
        if opened is None:
            log.info("broker_stopped")
            return
        store, telemetry, leading = opened
        require_no_copy_of_a_live_run(settings, store.run_id)
        _write_settings(settings)
        config = replace(
            ledger_config(settings, tasks, store.run_id, fingerprint), evaluation_sets=sets, adapter_of=adapters.of
        )
        contents = store.contents()
        metrics.recall(store.metrics_after(max(0, metrics_file.last - RECALLED_LINES)))
        refresh = refresh_of(settings, tasks["train"], contents, config.data_digest, adapters)
        ledger = Ledger(config, contents, clock.now())
        context = zmq.asyncio.Context()
        authenticator = Authenticator(context, security, clock, metrics.authenticator_counters)
        try:
            largest = MAX_HEADER_BYTES + 2 * TOKEN_BYTES * _longest_episode(settings, contents, sets)
            if settings.objective.routing_replay_from == "engine":
                largest += MAX_CHUNK_FRAME_BYTES
            work = RouterChannel(context, WORK, settings.broker.work_endpoint, authenticator, max_message_bytes=largest)
            batch = RouterChannel(context, BATCH, settings.broker.batch_endpoint, authenticator)
            broker = BrokerService(
                ledger,
                store,
                {WORK: work, BATCH: batch},
                {**tasks, **set_tasks},
                metrics_file,
                metrics,
                health,
                clock,
                lambda: datetime.now(tz=UTC).timestamp(),
                commit_interval_s=settings.broker.commit_interval_s,
                part_tokens=settings.broker.batch_part_tokens,
                keeps_experts=settings.objective.routing_replay_from == "engine",
                retention=retention_of(settings, metrics, clock),
                refresh=refresh,
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
            await _serve(broker, authenticator, upkeep, leading, stop)
        finally:
            authenticator.close()
            context.destroy()
    log.info("broker_stopped")


async def _serve(
    broker: BrokerService, authenticator: Authenticator, upkeep: Upkeep, leading: "Leading | None", stop: asyncio.Event
) -> None:
    async with asyncio.TaskGroup() as tasks:
        beside = [
            tasks.create_task(authenticator.run(), name="authenticator"),
            tasks.create_task(upkeep.run(), name="upkeep"),
        ]
        if leading is not None:
            beside.append(tasks.create_task(leading.run(), name="leadership"))
        try:
            await broker.run(stop)
        finally:
            for task in beside:
                task.cancel()


@asynccontextmanager
async def _opened(
    settings: Settings,
    fingerprint: str,
    registry: CollectorRegistry,
    page: Callable[[], TelemetryServer],
    health: Health,
    clock: Clock,
    stop: asyncio.Event,
) -> "AsyncIterator[tuple[Store, TelemetryServer, Leading | None] | None]":
    """The ledger, the process's page, and with a database the leadership of the run. None: it was stopped as a standby.

    Raises: ConfigurationError, EndpointError, ServiceError.
    """
    if settings.broker.database is None:
        with _open_store(settings, fingerprint) as store, page() as telemetry:
            yield store, telemetry, None
        return
    try:
        # psycopg is an extra, and costs memory.
        from gspo_services.broker.standby import lead
    except ImportError as error:
        raise ConfigurationError(f"broker.database needs psycopg: pip install 'psycopg[binary]>=3.2' ({error})") from error
    with page() as telemetry:
        log.info("waiting_to_lead", directory=str(settings.run.directory), metrics_port=telemetry.port)
        async with lead(settings, fingerprint, registry, health, clock, stop) as leading:
            yield None if leading is None else (leading.store, telemetry, leading)


def retention_of(settings: Settings, metrics: BrokerMetrics, clock: Clock) -> Retention:
    """What moves old tokens into archive files, from the settings."""
    return Retention(
        settings.run.directory / LEDGER_FILE,
        metrics,
        clock,
        # Archive files stay on one broker's disk: a standby's copy needs the tokens in the ledger itself.
        keep_batches=0 if settings.broker.database is not None else settings.broker.keep_batches,
        file_bytes=int(settings.broker.archive_file_mib * 2**20),
    )


def ledger_config(settings: Settings, tasks: dict[str, TaskSource], run_id: str, fingerprint: str) -> LedgerConfig:
    """The ledger's rules, from the settings."""
    num_eval_tasks = tasks["eval"].num_tasks if "eval" in tasks else 0
    wanted = settings.evaluation.num_tasks
    return LedgerConfig(
        run_id=run_id,
        fingerprint=fingerprint,
        seed=settings.run.seed,
        num_batches=settings.run.num_batches,
        group_size=settings.batch.group_size,
        groups_per_batch=settings.batch.groups_per_batch,
        max_lag=settings.batch.max_lag,
        schedules=RunSchedules(settings),
        grades_groups=bool(settings.reward.group),
        lease_s=settings.broker.lease_s,
        idle_lease_s=settings.broker.idle_lease_s,
        max_attempts=settings.broker.max_attempts,
        failure_budget=settings.broker.failure_budget,
        stop_without_signal_batches=settings.run.stop_without_signal_batches,
        evaluate_every_batches=settings.evaluation.every_batches,
        num_eval_tasks=wanted if num_eval_tasks is None else min(wanted, num_eval_tasks),
        evaluation_share=settings.evaluation.max_share,
        num_train_tasks=tasks["train"].num_tasks,
        # An agent may work without calling the model until its deadline.
        min_patience_s=max(MIN_PATIENCE_S, settings.agent.deadline_s if settings.agent.is_used else 0.0),
        sampling=sampling_rules(settings),
        sources=sources_of(tasks["train"]),
        ladders=tasks["train"].ladders if isinstance(tasks["train"], LadderTasks) else (),
        begun_on=datetime.now(tz=UTC).strftime("%d %b %Y"),
        data_digest=digest_of(tasks["train"]),
    )


def digest_of(tasks: TaskSource) -> str:
    """What a resumed run must have the same of; empty for tasks that follow from the configuration alone."""
    return tasks.digest if isinstance(tasks, MixedTasks | LadderTasks) else ""


def refresh_of(
    settings: Settings, tasks: TaskSource, contents: LedgerContents, digest: str, adapters: TaskAdapters
) -> Refresh | None:
    """What takes further tasks, with those that were added before; None where none can be added.

    Raises: ConfigurationError when the training tasks differ from those at the start of the run.
    """
    if contents.run.data_digest not in ("", digest):
        way_out = (
            "Put the files back as they were; more tasks are added by `gspo data add`"
            if isinstance(tasks, MixedTasks)
            else f"They were of {contents.run.data_digest}, and are of {digest or 'something else'} now: use the former"
        )
        raise ConfigurationError(
            f"the training tasks are not those that the run in {settings.run.directory} began with: a resumed run would "
            f"give other tasks to the same prompts. {way_out}"
        )
    if not isinstance(tasks, MixedTasks):
        return None
    read_additions(settings.run.directory, tasks, contents.additions)
    return Refresh(settings.run.directory, tasks, contents.additions, adapters.of_task)


def sources_of(tasks: TaskSource) -> tuple[SourceShare, ...]:
    """The sources of the training tasks with their weights; none where they are one list, or have no end."""
    if not isinstance(tasks, MixedTasks):
        return ()
    return tuple(SourceShare(name=name, weight=weight, num_tasks=number) for name, weight, number in tasks.parts)


def sampling_rules(settings: Settings) -> SamplingRules:
    """What becomes of zero-advantage groups, from the settings."""
    data, objective = settings.data, settings.objective
    most = math.ceil(data.max_filtered * settings.batch.groups_per_batch)
    return SamplingRules(
        max_filtered=most if data.dynamic_sampling else 0,
        by_turn=objective.advantage != "sequence",
        overlong_buffer_tokens=objective.overlong_buffer_tokens,
        rest_after_groups=data.rest_after_groups,
        rest_batches=data.rest_batches,
    )


def tasks_of(settings: Settings) -> dict[str, TaskSource]:
    """The tasks to train on, and the held-out ones if they are asked for and no named set takes their place.

    Raises: ConfigurationError when the environment cannot give them.
    """
    create = create_task_set if settings.agent.is_used else create_environment
    try:
        source = create(settings.environment.name, settings.environment.options)
        tasks = {"train": source.tasks("train")}
        if settings.evaluation.every_batches and not settings.evaluation.sets:
            tasks["eval"] = source.tasks("eval")
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


def require_no_copy_of_a_live_run(settings: Settings, run_id: str) -> None:
    """Two brokers of one identity are one to their learners and rollouts, which would mix the two runs.

    Only seen on one machine, by the settings of the last start. Raises: ConfigurationError.
    """
    own = settings.run.directory
    try:
        former = read_run_settings(own).run.directory
        mark = None if not former.exists() or former.samefile(own) else read_mark(former / MARK_FILE)
    except (ConfigurationError, OSError):
        return
    if mark is not None and mark.run_id == run_id and lock_holder(former / LEDGER_FILE) is not None:
        raise ConfigurationError(
            f"run.directory is {settings.run.directory}: a copy of {former}, whose broker is running, and both are run "
            f"{run_id}. Make a run of its own with `gspo backup {former} BACKUPS` and `gspo restore BACKUPS NEW_DIR`, or "
            "end the other one first"
        )


def _write_settings(settings: Settings) -> None:
    """Write the settings once the ledger has accepted them, so that a refused directory stays as it is."""
    try:
        write_run_settings(settings)
    except OSError as error:
        raise ConfigurationError(f"run.directory is {settings.run.directory}: cannot be used: {error}") from error


def _longest_episode(settings: Settings, contents: LedgerContents, sets: Sequence[SetTerms]) -> int:
    """The most tokens of a trajectory that a rollout may send: those of groups under way began under what was set then.

    Raises: ConfigurationError when a trajectory under way no longer fits the rollouts.
    """
    room = settings.rollout.max_total_tokens
    for group in contents.groups:
        if group.sampling.max_tokens > room:
            raise ConfigurationError(
                f"rollout.max_total_tokens is {room}, and group {group.group_id}, which is under way, may have "
                f"{group.sampling.max_tokens} tokens: it began under a larger sampling.max_tokens. Raise the first "
                "until its batch is trained"
            )
    own = [terms.sampling for terms in sets if terms.sampling is not None]
    samplings = [*own, *(group.sampling for group in contents.groups)]
    longest = max((sampling.max_episode_tokens for sampling in samplings), default=0)
    return max(longest, settings.largest_sampling.episode_tokens)


def require_batch_fits(settings: Settings) -> None:
    """A batch travels in parts, but what it consists of is one message: its trajectories must fit that, and its turns do by
    their own limit (``gspo_protocol.limits.trajectory_limits``).

    Raises: ConfigurationError with the values and what to do.
    """
    num_trajectories = settings.batch.groups_per_batch * settings.batch.group_size
    if num_trajectories > MAX_TRAJECTORIES_PER_BATCH:
        raise ConfigurationError(
            f"batch.groups_per_batch * batch.group_size is {num_trajectories}: {MAX_TRAJECTORIES_PER_BATCH} allowed"
        )
    sampling = settings.largest_sampling
    num_tokens = num_trajectories * sampling.episode_tokens
    if num_tokens > MAX_BATCH_TOKENS:
        name = "max_tokens" if sampling.max_episode_tokens is None else "max_episode_tokens"
        raise ConfigurationError(
            f"a batch of {num_trajectories} trajectories of sampling.{name} = {sampling.episode_tokens} could have "
            f"{num_tokens} tokens, {MAX_BATCH_TOKENS} allowed: use smaller batches or shorter trajectories"
        )
