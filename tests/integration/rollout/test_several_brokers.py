"""A rollout of three real broker processes that share a run: one is killed, comes back, and its trajectories go on."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import zmq.asyncio
from prometheus_client import CollectorRegistry

from gspo_protocol.channels import WORK
from gspo_protocol.limits import MAX_TURNS
from gspo_services.broker.store.store import Store
from gspo_services.rollout.environment_loop import EnvironmentLoop
from gspo_services.rollout.gathering import GatheringClient
from gspo_services.rollout.metrics import RolloutMetrics
from gspo_services.rollout.service import RolloutService
from gspo_services.rollout.several import SeveralBrokers
from gspo_services.rollout.tokenizer import ChatTokenizer
from gspo_services.shared.runtime.clock import MonotonicClock
from gspo_services.shared.runtime.telemetry import Health
from gspo_services.shared.settings.sections import PORT_STEP, Broker, Rollout
from gspo_services.tasks.environments import create_environment
from tests.support.broker.peers import ScriptedLearner
from tests.support.broker.process import BrokerProcess, broker_process, eventually
from tests.support.engines.chat_models import TINY_TEMPLATE, chat_tokenizer, save_chat_model
from tests.support.engines.scripted_engine import ScriptedEngine, some_token
from tests.support.episodes import ScriptedRewards
from tests.support.processes.ports import free_pair
from tests.support.processes.running_rollout import SteadySync

NUM_BROKERS = 3
NUM_BATCHES = 4
RUN_TIMEOUT_S = 60.0


class FollowingSync(SteadySync):
    """Serves whatever is announced, at once."""

    def __init__(self, engine: ScriptedEngine) -> None:
        super().__init__()
        self.policy_version = 0
        self._engine = engine

    def announce(self, policy_version: int, endpoint: str) -> None:
        super().announce(policy_version, endpoint)
        if policy_version > self.policy_version:
            self._engine.version = policy_version
            self.serve(policy_version)


class SharedRun:
    """Three brokers, each with a learner of its own, and one rollout."""

    def __init__(self, context: zmq.asyncio.Context, brokers: list[BrokerProcess], endpoints: Broker, model: Path) -> None:
        clock, self.registry = MonotonicClock(), CollectorRegistry()
        self.processes = brokers
        self.learners = [
            ScriptedLearner(context, endpoint, f"s{number}") for number, endpoint in enumerate(endpoints.batch_endpoints)
        ]
        self.engine = ScriptedEngine()
        self.engine.pace_s = 0.02  # Episodes are under way when something happens.
        self.sync = FollowingSync(self.engine)
        self.brokers = SeveralBrokers(
            [
                GatheringClient(
                    context, WORK, endpoint,
                    role="rollout", peer="rollout-0", session=f"r{number}", clock=clock, expected=(number, NUM_BROKERS),
                )
                for number, endpoint in enumerate(endpoints.work_endpoints)
            ],
            lease_s=15.0,
            heartbeat_s=0.1,
        )  # fmt: skip
        self.health = Health(clock, max_quiet_s=60.0)
        metrics = RolloutMetrics(self.registry)
        self.service = RolloutService(
            episodes=EnvironmentLoop(
                environment=create_environment("arithmetic", {}),
                tokenizer=ChatTokenizer(model),
                engine=self.engine,
                rewards=ScriptedRewards(),  # type: ignore[arg-type]
                broker=self.brokers,
                may_generate=self.sync.may_generate,
                max_turns=MAX_TURNS,
                chunk_tokens=4,
                metrics=metrics,
            ),
            brokers=self.brokers,
            sync=self.sync,  # type: ignore[arg-type]
            settings=Rollout(max_running=6),
            clock=clock,
            health=self.health,
            metrics=metrics,
        )

    def under_way(self, broker: int) -> set[int]:
        """A broker's trajectories of which the engine has made tokens."""
        held = self.service._running.items()
        return {number for number, each in held if self.brokers.of(number) == broker and each.work.num_tokens > 0}

    @property
    def num_finished(self) -> float:
        ends = [{"outcome": outcome} for outcome in ("done", "length")]
        return sum(self.registry.get_sample_value("gspo_rollout_episodes_total", end) or 0.0 for end in ends)


@contextlib.asynccontextmanager
async def a_shared_run(context: zmq.asyncio.Context, directory: Path) -> AsyncIterator[SharedRun]:
    work, batch = free_pairs()
    shared = {"work_endpoint": f"tcp://127.0.0.1:{work}", "batch_endpoint": f"tcp://127.0.0.1:{batch}"}
    async with contextlib.AsyncExitStack() as stack:
        processes = []
        for number in range(NUM_BROKERS):
            mine = directory / f"of-{number}"
            mine.mkdir()
            process = broker_process(
                mine,
                run={"num_batches": NUM_BATCHES},
                batch={"groups_per_batch": 2 * NUM_BROKERS},
                sampling={"max_turn_tokens": 24},
                broker={**shared, "num_brokers": NUM_BROKERS, "number": number},
            )
            processes.append(await stack.enter_async_context(process))
        model = save_chat_model(directory / "model", chat_tokenizer(TINY_TEMPLATE, "<|end|>"))
        yield SharedRun(context, processes, Broker(num_brokers=NUM_BROKERS, **shared), model)


def free_pairs() -> tuple[int, int]:
    """The first broker's ports, where those of all are free: of the brokers' work and batch endpoints."""
    while True:
        first = free_pair()
        with contextlib.ExitStack() as stack:
            try:
                for number in range(NUM_BROKERS):
                    for port in (first + PORT_STEP * number, first + PORT_STEP * number + 1):
                        stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except (OSError, OverflowError):
                continue
        return first, first + 1


def rows_of(run: SharedRun, number: int) -> list[tuple[int, int]]:
    """Trajectory and epoch of everything that a broker has in batches. Each token is checked."""
    process = run.processes[number]
    directory = process.run_directory / f"broker-{number}" if number else process.run_directory
    fingerprint = process.last("broker_started")["fingerprint"]
    found = []
    with Store(directory / "ledger.sqlite3", fingerprint=fingerprint, run_id="") as store:
        for index in range(NUM_BATCHES):
            _, items = store.batch(index)
            for row, payload in items:
                tokens = payload.token_ids.tolist()
                begin = row.num_tokens - row.num_action_tokens
                assert tokens[begin:] == [some_token(tokens[:place]) for place in range(begin, row.num_tokens)]
                found.append((row.trajectory_id, row.epoch))
    return found


async def test_a_killed_broker_comes_back_and_its_trajectories_go_on(tmp_path: Path, context: zmq.asyncio.Context) -> None:
    async with a_shared_run(context, tmp_path) as run:
        killed = run.processes[1]
        stop = asyncio.Event()
        async with asyncio.timeout(RUN_TIMEOUT_S), asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(run.service.run(stop))
            for learner in run.learners:
                tasks.create_task(learner.run())
            await eventually(lambda: bool(run.under_way(1)) and run.num_finished > 2)
            held, finished = run.under_way(1), run.num_finished
            await killed.kill()
            await eventually(lambda: run.num_finished >= finished + 6)
            await eventually(lambda: run.health.ready() == (False, f"broker 1 at {run.brokers.clients[1].endpoint} is away"))
            await killed.start()
            assert await serving, "the run is over"
        assert run.brokers.num_unacknowledged == 0
        for number, process in enumerate(run.processes):
            assert await process.terminate() == 0
            assert [process.count(event) for event in ("lease_expired", "attempt_failed")] == [0, 0]
            rows = rows_of(run, number)
            assert {trajectory % NUM_BROKERS for trajectory, _ in rows} == {number}
            assert len(dict(rows)) == len(rows) == NUM_BATCHES * 2 * 2
    assert held
    assert {epoch for trajectory, epoch in rows_of(run, 1) if trajectory in held} <= {1}
    assert {version for version, _ in run.sync.announced} == set(range(NUM_BATCHES + 2))
