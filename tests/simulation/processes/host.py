"""The places where processes run."""

import asyncio
from dataclasses import dataclass, field

from tests.simulation.loop import Process
from tests.simulation.operator import HostileProcess, OperatorProcess
from tests.simulation.processes.broker import BrokerProcess
from tests.simulation.processes.learner import LearnerProcess
from tests.simulation.processes.rollout import RolloutProcess

RESTART_S = 1.0

Part = BrokerProcess | RolloutProcess | LearnerProcess | OperatorProcess | HostileProcess


@dataclass
class Host:
    """A place where one process runs, life after life."""

    name: str
    wanted: bool = True
    """It is started again when it ends."""
    process: Process | None = None
    part: Part | None = None
    task: "asyncio.Task[None] | None" = None
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    down_s: float = RESTART_S
    """Time from its end to its next start."""
    peer: str = ""
    """The name of its process, when it is not that of the place."""
    once: bool = False
    """It is not started again after it was turned away or replaced."""
