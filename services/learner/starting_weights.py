"""``python -m gspo_services.learner.starting_weights CONFIG``: publishes the model that a run starts from.

``gspo generate`` runs it in the learner's place: rollouts serve only verified versions, so that somebody has to publish one.
"""

import signal
import threading
import uuid
from contextlib import nullcontext
from functools import partial
from typing import Final

import structlog
from prometheus_client import CollectorRegistry

from gspo_protocol.sessions import new_session
from gspo_services.shared.runtime.clock import MonotonicClock
from gspo_services.shared.runtime.errors import ConfigurationError, exit_status
from gspo_services.shared.runtime.lifecycle import leave
from gspo_services.shared.runtime.logs import configure_logging
from gspo_services.shared.runtime.telemetry import Health, TelemetryServer
from gspo_services.shared.settings import Settings, parse_process_arguments

log = structlog.get_logger()

MAX_QUIET_S: Final = 1800.0
POLL_S: Final = 1.0


def main() -> int:
    """Publish and serve until SIGTERM. Returns the exit status."""
    configure_logging("weights")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return exit_status(partial(_run, stop))


def _run(stop: threading.Event) -> None:
    arguments = parse_process_arguments("gspo generate", "Publish the starting weights.", default_name="learner")
    _serve(arguments.settings, stop)


def _serve(settings: Settings, stop: threading.Event) -> None:
    # torch takes seconds to import, so check the configuration first.
    from gspo.model.policy import load_policy
    from gspo.model.serving import served_parameters
    from gspo_services.learner.broker import Publication
    from gspo_services.learner.checkpoints import Versions
    from gspo_services.learner.metrics import LearnerMetrics
    from gspo_services.learner.opening import broker_thread
    from gspo_services.learner.weights import DTYPES, copy_parameters

    clock, registry = MonotonicClock(), CollectorRegistry()
    metrics, health = LearnerMetrics(registry), Health(clock, MAX_QUIET_S)
    telemetry = TelemetryServer(settings.security.metrics_host, settings.learner.metrics_port, registry, health)
    broker = broker_thread(settings, session=new_session(), clock=clock, health=health, metrics=metrics)
    with telemetry, broker:
        try:
            model = load_policy(settings.model.path, DTYPES[settings.learner.dtype])
        except ValueError as error:
            raise ConfigurationError(f"model.path: {error}") from error
        welcome = None
        while welcome is None:
            if stop.is_set():
                return
            health.not_ready(broker.reason_to_wait)
            welcome = broker.wait_welcome(POLL_S)
        versions = Versions(settings.run.directory / "checkpoints", uuid.uuid4().hex)
        versions.begin(welcome)
        weights = copy_parameters(served_parameters(model, gathered=nullcontext, dtype=DTYPES[settings.model.dtype]))
        version = versions.number(weights.digest() if versions.needs_digest(0) else "", 0)
        versions.reserve(version, 0)
        broker.publish(
            Publication(
                policy_version=version,
                weights=weights,
                trained_batches=0,
                vocabulary=int(model.config.vocab_size),
                note_digest=partial(versions.note_digest, version),
            )
        )
        # Not ``stop.wait``: the signal's handler calls ``set`` in this same thread, and both take the same lock.
        while not stop.is_set():
            health.progress()
            broker.take(POLL_S)


if __name__ == "__main__":
    leave(main())
