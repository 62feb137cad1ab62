"""A rollout's process with a scripted engine: the trajectory of one seed kills it (SIGKILL) in the environment's step.

``python -m tests.support.processes.deadly_rollout ENDPOINT NAME SEED MODEL_DIRECTORY MAX_RUNNING``
"""

import asyncio
import secrets
import sys
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from gspo_protocol.channels import WORK
from gspo_services.rollout.metrics import RolloutMetrics
from gspo_services.rollout.service import RolloutService
from gspo_services.rollout.tokenizer import ChatTokenizer
from gspo_services.shared.runtime.clock import MonotonicClock
from gspo_services.shared.runtime.lifecycle import run_until_stopped
from gspo_services.shared.runtime.telemetry import Health
from gspo_services.shared.settings.sections import Rollout
from tests.support.engines.scripted_engine import ScriptedEngine
from tests.support.episodes import an_environment_loop
from tests.support.processes.running_rollout import SteadySync
from tests.support.wire.zmq_ends import a_client, zmq_context


class FollowingSync(SteadySync):
    """The engine has each version as soon as it is announced."""

    def __init__(self, engine: ScriptedEngine) -> None:
        super().__init__()
        self.policy_version = 0
        self._engine = engine

    def announce(self, policy_version: int, endpoint: str) -> None:
        if policy_version > self.policy_version:
            self._engine.version = policy_version
            self.serve(policy_version)


async def run(stop: asyncio.Event) -> None:
    endpoint, name, seed, directory, max_running = sys.argv[1:]
    engine, clock, metrics = ScriptedEngine(), MonotonicClock(), RolloutMetrics(CollectorRegistry())
    async with zmq_context() as context:
        client = a_client(context, WORK, endpoint, name=name, session=secrets.token_hex(8), clock=clock)
        sync: Any = FollowingSync(engine)
        loop = an_environment_loop(
            ChatTokenizer(Path(directory)), engine=engine, broker=client, may_generate=sync.may_generate, metrics=metrics,
            any_task=True, deadly_seed=int(seed),
        )  # fmt: skip
        service = RolloutService(
            episodes=loop, broker=client, sync=sync, settings=Rollout(max_running=int(max_running), drain_s=5.0),
            clock=clock, health=Health(clock, 60.0), metrics=metrics, heartbeat_s=0.2,
        )  # fmt: skip
        await service.run(stop)


if __name__ == "__main__":
    run_until_stopped(run)
