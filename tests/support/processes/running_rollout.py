"""A running RolloutService between a scripted broker and a scripted engine."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import zmq.asyncio
from prometheus_client import CollectorRegistry

from gspo_protocol.channels import WORK, ChannelSpec
from gspo_protocol.messages import (
    Heartbeat,
    Lease,
)
from gspo_services.rollout.colocate import TimeSharing
from gspo_services.rollout.group_rewards import GroupRewards
from gspo_services.rollout.metrics import RolloutMetrics
from gspo_services.rollout.service import RolloutService
from gspo_services.rollout.tokenizer import ChatTokenizer
from gspo_services.rollout.work import EpisodeRunner
from gspo_services.shared.runtime.telemetry import Health
from gspo_services.shared.settings.sections import Rollout
from tests.support.broker.scripted_broker import ScriptedBroker
from tests.support.clocks import VirtualClock
from tests.support.engines.scripted_engine import ScriptedEngine
from tests.support.episodes import a_new_lease, an_environment_loop
from tests.support.wire.zmq_ends import a_client, in_background, zmq_context

TURN_TOKENS = 12


class SteadySync:
    """A weight sync whose version the test sets."""

    def __init__(self) -> None:
        self.policy_version = 3
        self.quarantined = ""
        self.loading = False
        self.may_generate = asyncio.Event()
        self.may_generate.set()
        self.device_free, self.given_up, self.asked_back = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.device_free.set()
        self.announced: list[tuple[int, str]] = []
        self._on_change: Callable[[], None] = lambda: None

    def on_change(self, callback: Callable[[], None]) -> None:
        self._on_change = callback

    def announce(self, policy_version: int, endpoint: str) -> None:
        self.announced.append((policy_version, endpoint))

    @property
    def has_device(self) -> bool:
        return self.device_free.is_set()

    async def give_up(self, may: Callable[[], bool]) -> None:
        if may():
            self.device_free.clear()
            self.may_generate.clear()
            self.given_up.set()

    async def bring_back(self) -> None:
        """Waits until the test ends the learner's time on the device."""
        self.asked_back.set()
        await self.device_free.wait()
        self.may_generate.set()

    def serve(self, policy_version: int, quarantined: str = "") -> None:
        self.policy_version, self.quarantined = policy_version, quarantined
        self._on_change()

    async def run(self) -> None:
        await asyncio.Event().wait()


class Running:
    """A RolloutService with everything that it needs."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        tokenizer: ChatTokenizer,
        spec: ChannelSpec,
        drain_s: float,
        max_running: int,
    ) -> None:
        self.tokenizer = tokenizer
        self.broker = ScriptedBroker(context, spec)
        self.engine = ScriptedEngine()
        self.sync = SteadySync()
        self.clock = VirtualClock()
        self.health = Health(self.clock, max_quiet_s=10.0)
        self.registry = CollectorRegistry()
        self.metrics = RolloutMetrics(self.registry)
        self.stop = asyncio.Event()
        self.client = a_client(context, spec, self.broker.endpoint, clock=self.clock)
        self.group_rewards: GroupRewards | None = None
        self.prepared: Any = None
        self.settings = Rollout(max_running=max_running, drain_s=drain_s)
        self.prompt_tokens = len(tokenizer.prompt_ids([{"role": "user", "content": "What is 12 + 30?"}]))

    def environment_loop(self) -> EpisodeRunner:
        """Episodes of a counting environment."""
        return an_environment_loop(
            self.tokenizer,
            engine=self.engine,
            broker=self.client,
            chunk_tokens=100,
            may_generate=self.sync.may_generate,
            metrics=self.metrics,
        )

    async def serve(self, episodes: EpisodeRunner, *, colocated: bool = False) -> None:
        """Be a rollout with these episodes until ``stop``. ``group_rewards``, if set, compares groups."""
        service = RolloutService(
            episodes=episodes,
            broker=self.client,
            sync=self.sync,  # type: ignore[arg-type]
            settings=self.settings,
            clock=self.clock,
            health=self.health,
            metrics=self.metrics,
            sharing=TimeSharing(self.sync, look_s=0.001) if colocated else None,  # type: ignore[arg-type]
            groups=self.group_rewards,
            heartbeat_s=0.05,
        )
        await service.run(self.stop)

    async def heartbeats(self, number: int) -> None:
        """Wait for this many more."""
        await self.broker.expect(Heartbeat, len(self.broker.of(Heartbeat)) + number)

    def count(self, name: str, **labels: str) -> float:
        value = self.registry.get_sample_value(f"gspo_rollout_{name}", labels)
        return 0.0 if value is None else value


Start = Callable[..., contextlib.AbstractAsyncContextManager[Running]]


def starter(tokenizer: ChatTokenizer) -> Start:
    """Starts a ``RunningRollout`` as a context."""

    @contextlib.asynccontextmanager
    async def start(
        spec: ChannelSpec = WORK,
        drain_s: float = 5.0,
        max_running: int = 4,
        *,
        colocated: bool = False,
        prepare: Callable[[Running], Any] = lambda run: None,
    ) -> AsyncIterator[Running]:
        """Runs until the block ends; then the service must end by itself. ``prepare``: what is done before; ``prepared`` is
        what it returns."""
        async with zmq_context() as context:
            run = Running(context, tokenizer, spec, drain_s, max_running)
            run.prepared = prepare(run)
            async with in_background(run.broker.serve()):
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(run.serve(run.environment_loop(), colocated=colocated))
                    try:
                        yield run
                    finally:
                        run.stop.set()

    return start


def leases(number: int, **changes: Any) -> list[Lease]:
    """Leases of new trajectories."""
    return [a_new_lease(trajectory_id=index, **changes) for index in range(1, number + 1)]
