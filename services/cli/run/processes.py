"""Lists the processes of a run, from its settings."""

from collections.abc import Sequence
from typing import Final

from gspo_services.cli.run.supervisor import ProcessSpec
from gspo_services.runs.track import find_client
from gspo_services.shared.placement import Placement, ProcessPlace
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings import Settings

GRACE_S: Final = 20.0
TRACKER_GRACE_S: Final = 45.0
"""A tracker that hangs at the end of a run is killed; `gspo track` sends later what it did not take."""
TRACKER_PREFIX: Final = "tracker-"
LEARNER_GRACE_S: Final = 600.0
"""When stopped, a learner finishes its batch and saves a checkpoint; at the end of a run it exports the model."""


def process_specs(settings: Settings, forwarded: Sequence[str], placement: Placement | None = None) -> list[ProcessSpec]:
    """Return broker, learner and ``num_servers`` rollout specs. ``forwarded``: the configuration file and overrides.

    ``placement``: their GPUs and cores; None: all that this process may use. Rollouts stop first, because they hand their
    trajectories to the broker. Then the learner saves a checkpoint and tells the broker, which stops last. Raises:
    ConfigurationError for several rollouts on one server.
    """
    rollout = settings.rollout
    if rollout.num_servers > 1 and (rollout.server_url or rollout.server_port):
        key, value = ("server_url", rollout.server_url) if rollout.server_url else ("server_port", rollout.server_port)
        raise ConfigurationError(
            f"rollout.num_servers is {rollout.num_servers} and rollout.{key} is {value}: every rollout needs its own "
            f"server; use rollout.num_servers = 1, or omit rollout.{key}"
        )
    specs = [
        ProcessSpec(
            name="broker",
            module="gspo_services.broker",
            arguments=tuple(forwarded),
            stop_order=2,
            grace_s=GRACE_S,
            ends_by_itself=False,
        ),
        ProcessSpec(
            name="learner",
            module="gspo_services.learner",
            arguments=tuple(forwarded),
            stop_order=1,
            grace_s=LEARNER_GRACE_S,
            ends_by_itself=False,
            place=ProcessPlace() if placement is None else placement.learner,
            python=settings.learner.python,
        ),
    ]
    for index in range(rollout.num_servers):
        own: list[str] = []
        for key, first_port in (("rollout.metrics_port", rollout.metrics_port), ("agent.port", settings.agent.port)):
            own += ["--set", f"{key}={first_port + index if first_port else 0}"]
        # A rollout that lingered here would keep the run from ending.
        own += ["--set", "rollout.linger=false", "--name", f"rollout-{index}"]
        arguments = (*forwarded, *own)
        specs.append(
            ProcessSpec(
                name=f"rollout-{index}",
                module="gspo_services.rollout",
                arguments=arguments,
                stop_order=0,
                grace_s=rollout.drain_s + GRACE_S,
                place=ProcessPlace() if placement is None else placement.rollouts[index],
                python=rollout.python,
            )
        )
    return specs


def tracker_specs(settings: Settings, forwarded: Sequence[str]) -> list[ProcessSpec]:
    """Return a process spec for each of trackers.to. Trackers stop last, after the broker has written its last line.

    Raises: ConfigurationError when a tracker's client is not installed.
    """
    for name in settings.trackers.to:
        find_client(name)
    return [
        ProcessSpec(
            name=f"{TRACKER_PREFIX}{name}",
            module="gspo_services.runs.track.command",
            arguments=(*forwarded, "--to", name, "--follow"),
            stop_order=3,
            grace_s=TRACKER_GRACE_S,
            ends_by_itself=False,
            is_essential=False,
        )
        for name in settings.trackers.to
    ]
