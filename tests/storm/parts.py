"""The two parts of the storm: one run of an environment with all kinds of rewards, and one of agents."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.storm.attacker import is_hostile
from tests.support.processes.run_process import REPOSITORY

CONFIG: Final = REPOSITORY / "examples/arithmetic.toml"
WORK_PORT: Final = 7001
BATCH_PORT: Final = 7002
WEIGHTS_PORT: Final = 7003
SANDBOX_PORTS: Final = (7010, 7011)
KEEP_CHECKPOINTS: Final = 4
"""The newest, and the best one if it is none of them."""
ALWAYS: Final = ("broker", "learner", "rollout", "scheduler", "reward")
"""Kinds of processes that both parts have."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One run of the storm."""

    name: str
    settings: tuple[str, ...]
    roles: tuple[str, ...]
    """The kinds of processes that are killed and suspended."""
    sandbox_ports: tuple[int, ...] = ()
    """Of the servers of sandboxes beside the run."""
    has_reward_model: bool = False
    is_hostile: Callable[[str], bool] = lambda problem: False
    """Whether a task's episodes are an attacker's, who may lose them."""


def notes(place: Path) -> Path:
    """Where attackers say what they did."""
    return place / "attacks"


def blows(place: Path) -> Path:
    """This file is there while the storm blows."""
    return place / "blows"


def parts(place: Path) -> dict[str, Part]:
    """By name. ``place`` has the files of a part's run."""
    common = (
        f"broker.work_endpoint=tcp://127.0.0.1:{WORK_PORT}",
        f"broker.batch_endpoint=tcp://127.0.0.1:{BATCH_PORT}",
        f"learner.weights_endpoint=tcp://127.0.0.1:{WEIGHTS_PORT}",
        "broker.metrics_port=0",
        "learner.metrics_port=0",
        "rollout.metrics_port=0",
        "learner.learning_rate=3e-5",
        f"learner.keep_checkpoints={KEEP_CHECKPOINTS}",
        "evaluation.every_batches=25",
        "reward.workers=1",
    )
    urls = ",".join(f'"http://127.0.0.1:{port}"' for port in SANDBOX_PORTS)
    environment = Part(
        name="environment",
        settings=(
            *common,
            "environment.name=tests.storm.mixture:Mixture",
            f"sandbox.urls=[{urls}]",
            "sandbox.max_sandboxes=2",
            f"reward.model={place / 'classifier'}",
            "reward.model_weight=0.01",
        ),
        roles=(*ALWAYS, "reward model", "sandbox server", "sandbox"),
        sandbox_ports=SANDBOX_PORTS,
        has_reward_model=True,
    )
    agents = Part(
        name="agents",
        settings=(
            *common,
            "agent.function=tests.storm.agent:solve",
            "agent.deadline_s=10",
            f"agent.environment.GSPO_STORM_NOTES={notes(place)}",
            f"agent.environment.GSPO_STORM_BLOWS={blows(place)}",
            "reward.group=tests.storm.mixture:beside",
            # A group waits for its slowest episode, and the run for that group after max_lag batches, which therefore take
            # longer than the deadline, as they do where an episode takes minutes.
            "batch.groups_per_batch=64",
        ),
        roles=(*ALWAYS, "agent"),
        is_hostile=is_hostile,
    )
    return {part.name: part for part in (environment, agents)}
