"""``gspo learner CONFIG``: wiring of the learner process. With several ranks it starts them."""

import gc
import math
import os
import signal
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import structlog
from prometheus_client import CollectorRegistry

from gspo.model_files.configuration import read_config, require_unquantised
from gspo_protocol.sessions import new_session
from gspo_services.learner.start import (
    Node,
    ended_by_signals,
    engine_settings_of,
    is_rank,
    log_expected_memory,
    parallelism_of,
    require_adaptable,
    require_positions,
    require_sequence_parallel,
    require_supported,
    require_teacher,
    run_ranks,
    warn_without_rdma,
)
from gspo_services.learner.teacher import TeacherServer, require_same_texts
from gspo_services.shared.colocate import LOCK_FILE, DeviceLock
from gspo_services.shared.placement import require_bfloat16, require_driver
from gspo_services.shared.runtime.clock import MonotonicClock
from gspo_services.shared.runtime.errors import ConfigurationError, exit_status
from gspo_services.shared.runtime.lifecycle import die_with_parent, leave
from gspo_services.shared.runtime.logs import configure_logging
from gspo_services.shared.runtime.telemetry import LOOP_STALL_S, Health, TelemetryServer
from gspo_services.shared.settings import Learner, Settings, parse_process_arguments, require_model

log = structlog.get_logger()

MAX_QUIET_S: Final = 1800.0


def main() -> int:
    """Start the learner, or this machine's ranks of it. Returns the exit status."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # torchrun, which starts ranks on several machines, gives each its own session. If torchrun were killed, its
        # ranks would keep training beside its successor's, on the same ports, and nothing could ask them to stop.
        die_with_parent(signal.SIGKILL)
    configure_logging("learner")
    return exit_status(_run)


def _run() -> int | None:
    arguments = parse_process_arguments(
        "gspo learner",
        "Train: batches in, policy versions out (DeepSpeed).",
        default_name="learner",
        shorthands={"--profile": ("learner.profile=true", "log where the time of each batch goes")},
    )
    settings = arguments.settings
    _require_trainable(settings)
    learner = settings.learner
    if learner.num_ranks * learner.num_nodes > 1 and not is_rank():
        return run_ranks("gspo_services.learner", arguments.forwarded, learner.num_ranks, node=_node(learner))
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    _serve(settings, stop)
    return None


def _node(learner: Learner) -> Node | None:
    if learner.num_nodes == 1:
        return None
    host, _, port = learner.rendezvous_address.rpartition(":")
    return Node(index=learner.node_rank, num_nodes=learner.num_nodes, host=host, port=int(port))


def _require_trainable(settings: Settings) -> None:
    """Raises: ConfigurationError."""
    require_driver()
    require_model(settings.model.path)
    learner = settings.learner
    try:
        model_config = read_config(settings.model.path)
        require_unquantised(model_config)
        plan = parallelism_of(
            model_config,
            num_ranks=int(os.environ["WORLD_SIZE"]) if is_rank() else learner.num_ranks * learner.num_nodes,
            expert_parallel=learner.expert_parallel,
            routing_replay=settings.objective.routing_replay,
            load_balance=settings.objective.load_balance_coefficient > 0,
            scales_routers=learner.router_rate_factor != 1,
            moves_biases=settings.objective.expert_bias_rate > 0,
        )
        require_supported(plan)
        require_adaptable(model_config, settings.lora, learner, moves_biases=plan.moves_biases)
        require_sequence_parallel(
            model_config, learner.sequence_parallel, num_ranks=plan.num_ranks, load_balance=plan.load_balance
        )
        require_positions(model_config, settings)
    except ValueError as error:
        raise ConfigurationError(f"the model in {settings.model.path} cannot be trained: {error}") from error
    try:
        require_teacher(settings, settings.model.path)
        if settings.distillation.url and os.environ.get("RANK", "0") == "0":  # Also where torchrun has started it.
            server = TeacherServer(settings.distillation.url, timeout_s=settings.distillation.timeout_s)
            require_same_texts(server, settings.model.path)
            server.require_length(settings.largest_sampling.max_tokens)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error


def _serve(settings: Settings, stop: threading.Event) -> None:
    # torch and DeepSpeed take seconds to import, so check the configuration first.
    import torch

    from gspo_services.learner.broker import BrokerThread, RankThread
    from gspo_services.learner.checkpoints import CheckpointScrub
    from gspo_services.learner.engine import ColocatedDevice, LearnerEngine, init_distributed
    from gspo_services.learner.first_look import FirstLook
    from gspo_services.learner.lost_rank import lost_ranks_named
    from gspo_services.learner.metrics import LearnerMetrics
    from gspo_services.learner.opening import broker_thread, introduce
    from gspo_services.learner.profiling import profiled
    from gspo_services.learner.service import LearnerService

    clock = MonotonicClock()
    rank = int(os.environ.get("RANK", "0"))
    registry = CollectorRegistry()
    metrics = LearnerMetrics(registry)
    # On rank 0 the broker's loop reports liveness. The other ranks have only the training, which may be silent for long.
    health = Health(clock, MAX_QUIET_S, max_stall_s=LOOP_STALL_S if rank == 0 else math.inf)
    if torch.cuda.is_available():
        require_bfloat16(settings, torch.cuda.get_device_name(), torch.cuda.get_device_capability())
    engine_settings = engine_settings_of(settings, "cuda" if torch.cuda.is_available() else "cpu")
    if rank == 0:
        model_config = read_config(settings.model.path)
        log_expected_memory(model_config, settings, engine_settings.device)
        warn_without_rdma(model_config, settings, engine_settings.device)
    # One rank of each machine answers the probes. Only rank 0 has the learner's metrics.
    telemetry = (
        TelemetryServer(
            settings.security.metrics_host,
            settings.learner.metrics_port,
            registry if rank == 0 else CollectorRegistry(),
            health,
        )
        if os.environ.get("LOCAL_RANK", "0") == "0"
        else nullcontext()
    )
    broker: AbstractContextManager[BrokerThread | RankThread] = (
        broker_thread(settings, session=new_session(), clock=clock, health=health, metrics=metrics)
        if rank == 0
        else RankThread(settings, clock=clock, metrics=metrics, rank=rank, local_rank=int(os.environ.get("LOCAL_RANK", "0")))
    )
    device = None
    if settings.run.colocate:
        lock = DeviceLock(settings.run.directory / LOCK_FILE, "learner")
        device = ColocatedDevice(lock, clock=clock, health=health, metrics=metrics)
    with telemetry, broker as opened, lost_ranks_named():
        if device is not None:
            device.begin(stop.is_set)
        try:
            with ended_by_signals() if is_rank() else nullcontext():
                if stop.is_set():
                    return
                if rank != 0:
                    rendezvous = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
                    health.not_ready(f"waiting for rank 0 at {rendezvous}")
                init_distributed(engine_settings.device, settings.learner.collective_timeout_s)
            engine = LearnerEngine.create(settings.model.path, engine_settings)
        except ValueError as error:
            raise ConfigurationError(f"the model in {settings.model.path} cannot be trained: {error}") from error
        introduce(engine, opened, settings.learner.advertised_weights_endpoint)
        if device is not None:
            # DeepSpeed collects garbage whenever the states leave. What exists by now stays for good, and is not looked at.
            gc.freeze()
            device.made(engine)
        try:
            checkpoints = settings.run.directory / "checkpoints"
            scrub = CheckpointScrub(checkpoints, metrics.damaged_checkpoint_files.set) if rank == 0 else nullcontext()
            with scrub, profiled(settings, engine, clock) as profile:
                LearnerService(
                    settings,
                    engine,
                    opened,
                    clock=clock,
                    health=health,
                    metrics=metrics,
                    stop=stop,
                    profile=profile,
                    device=device,
                    first_look=FirstLook.of(settings, engine_settings.device),
                ).run()
        finally:
            engine.close()


if __name__ == "__main__":
    leave(main())
