"""A rollout between a scripted broker and a scripted engine, over real ZeroMQ."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
import zmq.asyncio
from prometheus_client import CollectorRegistry

from protocol.channels import WORK, ChannelSpec
from protocol.messages import (
    Ack,
    Finish,
    Heartbeat,
    Lease,
    LeaseEnded,
    LeaseKey,
    LeaseRequest,
    Pulse,
    Release,
)
from services.rollout.engine import EngineUnreachable
from services.rollout.metrics import RolloutMetrics
from services.rollout.service import BROKER_SILENT_S, ENGINE_FAILURES_ALLOWED, RolloutService
from services.rollout.tokens import ChatTokenizer
from services.runtime.lifecycle import ServiceError, flatten
from services.runtime.settings import Rollout
from services.runtime.telemetry import Health
from tests.support.chat_models import TINY_TEMPLATE, chat_tokenizer, save_chat_model
from tests.support.clocks import VirtualClock
from tests.support.episodes import a_new_lease, an_agent, no_tokens, resumed, whole
from tests.support.scripted_broker import ScriptedBroker
from tests.support.scripted_engine import ScriptedEngine
from tests.support.zmq_ends import PATIENCE_S, a_client, in_background, zmq_context

TURN_TOKENS = 6


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer(save_chat_model(tmp_path_factory.mktemp("model"), chat_tokenizer(TINY_TEMPLATE, "<|end|>")))


class SteadySync:
    """A weight sync that serves what the test says."""

    def __init__(self) -> None:
        self.policy_version = 3
        self.quarantined = ""
        self.loading = False
        self.may_generate = asyncio.Event()
        self.may_generate.set()
        self.announced: list[tuple[int, str]] = []
        self._on_change: Callable[[], None] = lambda: None

    def on_change(self, callback: Callable[[], None]) -> None:
        self._on_change = callback

    def announce(self, policy_version: int, endpoint: str) -> None:
        self.announced.append((policy_version, endpoint))

    def serve(self, policy_version: int, quarantined: str = "") -> None:
        self.policy_version, self.quarantined = policy_version, quarantined
        self._on_change()

    async def run(self) -> None:
        await asyncio.Event().wait()


class Running:
    """One RolloutService and everything around it."""

    def __init__(
        self, context: zmq.asyncio.Context, tokenizer: ChatTokenizer, spec: ChannelSpec, drain_s: float, max_running: int
    ) -> None:
        self.broker = ScriptedBroker(context, spec)
        self.engine = ScriptedEngine()
        self.sync = SteadySync()
        self.clock = VirtualClock()
        self.health = Health(self.clock, max_quiet_s=10.0)
        self.registry = CollectorRegistry()
        self.metrics = RolloutMetrics(self.registry)
        self.stop = asyncio.Event()
        self.client = a_client(context, spec, self.broker.endpoint, clock=self.clock)
        self.service = RolloutService(
            agent=an_agent(
                tokenizer,
                engine=self.engine,
                broker=self.client,
                chunk_tokens=100,
                max_turn_tokens=TURN_TOKENS,
                may_generate=self.sync.may_generate,
                metrics=self.metrics,
            ),
            broker=self.client,
            sync=self.sync,  # type: ignore[arg-type]
            settings=Rollout(max_running=max_running, drain_s=drain_s),
            clock=self.clock,
            health=self.health,
            metrics=self.metrics,
            heartbeat_s=0.05,
        )
        self.prompt_tokens = len(tokenizer.prompt_ids([{"role": "user", "content": "What is 12 + 30?"}]))

    async def heartbeats(self, number: int) -> None:
        """Wait for so many more."""
        await self.broker.expect(Heartbeat, len(self.broker.of(Heartbeat)) + number)

    def count(self, name: str, **labels: str) -> float:
        value = self.registry.get_sample_value(f"gspo_rollout_{name}", labels)
        return 0.0 if value is None else value


Start = Callable[..., contextlib.AbstractAsyncContextManager[Running]]


@pytest.fixture
def running(tokenizer: ChatTokenizer) -> Start:
    @contextlib.asynccontextmanager
    async def start(spec: ChannelSpec = WORK, drain_s: float = 5.0, max_running: int = 4) -> AsyncIterator[Running]:
        """Runs until the block ends; then the service must end by itself."""
        async with zmq_context() as context:
            run = Running(context, tokenizer, spec, drain_s, max_running)
            async with in_background(run.broker.serve()):
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(run.service.run(run.stop))
                    try:
                        yield run
                    finally:
                        run.stop.set()

    return start


def leases(number: int, **changes: Any) -> list[Lease]:
    return [a_new_lease(trajectory_id=index, **changes) for index in range(1, number + 1)]


# --- leases -----------------------------------------------------------------------------------------------------------


async def test_leases_are_taken_up_to_capacity_and_every_episode_is_finished(running: Start) -> None:
    async with running(max_running=4) as run:
        run.broker.grant(*leases(6))
        request = await run.broker.expect(LeaseRequest)
        assert (request.capacity, request.policy_version) == (4, 3)
        await run.broker.until(lambda: len(run.broker.of(Finish)) == 6)
    assert sorted(finish.trajectory_id for finish in run.broker.of(Finish)) == [1, 2, 3, 4, 5, 6]
    for trajectory_id in range(1, 7):
        assert whole(run.broker.chunks[trajectory_id]).kinds[-TURN_TOKENS:] == [("action", 0)] * TURN_TOKENS
    assert run.count("episodes_total", outcome="length") == 6
    assert run.count("episodes_running") == 0


async def test_only_the_free_places_are_asked_for(running: Start) -> None:
    async with running(max_running=3) as run:
        hold = run.engine.hold_at(run.prompt_tokens)
        run.broker.retry_s = 0.0
        run.broker.grant(*leases(2))
        await run.broker.until(lambda: run.broker.of(LeaseRequest) and run.broker.of(LeaseRequest)[-1].capacity == 1)
        assert run.broker.of(LeaseRequest)[0].capacity == 3
        hold.go.set()


async def test_leases_beyond_the_free_places_go_straight_back(running: Start) -> None:
    async with running(max_running=2) as run:
        hold = run.engine.hold_at(run.prompt_tokens)
        run.broker.grant(*leases(2))
        await hold.reached.wait()
        await run.broker.send(a_new_lease(trajectory_id=3), no_tokens())
        surplus = await run.broker.expect(Release)
        assert (surplus.trajectory_id, surplus.reason, surplus.failed) == (3, "no room", False)
        assert run.count("episodes_running") == 2


async def test_after_a_no_lease_nothing_is_asked_until_its_pause_is_over(running: Start) -> None:
    async with running() as run:
        await run.broker.expect(LeaseRequest)
        await run.heartbeats(3)
        assert len(run.broker.of(LeaseRequest)) == 1
        run.clock.advance(60.1)
        await run.broker.expect(LeaseRequest, 2)


async def test_nothing_is_asked_for_before_a_verified_version_is_served(running: Start) -> None:
    async with running() as run:
        run.sync.serve(0)
        await run.broker.expect(Heartbeat)
        run.sync.serve(0, quarantined="wrong digest")
        await run.broker.until(lambda: run.broker.of(Heartbeat)[-1].status == "quarantined")
        assert run.broker.of(LeaseRequest) == []
        assert run.health.ready() == (False, "wrong digest")
        run.sync.serve(9)
        assert (await run.broker.expect(LeaseRequest)).policy_version == 9
        await run.broker.until(lambda: run.broker.of(Heartbeat)[-1].status == "serving")


async def test_announced_versions_reach_the_weight_sync(running: Start) -> None:
    async with running() as run:
        run.broker.pulse = Pulse(policy_version=12, weights_endpoint="tcp://w:1")
        await run.broker.until(lambda: (12, "tcp://w:1") in run.sync.announced)


async def test_a_resumed_lease_goes_on_behind_its_tokens(running: Start) -> None:
    async with running() as run:
        run.broker.grant(a_new_lease())
        await run.broker.expect(Finish)
        original = run.broker.chunks.pop(7)
        tokens = whole(original).token_ids
        half = msgspec.structs.replace(original[0][0], turn_done=False)
        lease, arrays = resumed(a_new_lease(), [(half, original[0][1])])
        cut = len(tokens) - 2
        lease = msgspec.structs.replace(
            lease,
            num_tokens=cut,
            segments=[*lease.segments[:-1], msgspec.structs.replace(lease.segments[-1], num_tokens=TURN_TOKENS - 2)],
            version_runs=[
                *lease.version_runs[:-1],
                msgspec.structs.replace(lease.version_runs[-1], num_tokens=TURN_TOKENS - 2),
            ],
        )
        await run.broker.send(lease, {name: array[:cut] for name, array in arrays.items()})
        await run.broker.expect(Finish, 2)
        (chunk, chunk_arrays) = run.broker.chunks[7][0]
        assert (chunk.offset, chunk.epoch) == (cut, 2)
        assert chunk_arrays["token_ids"].tolist() == tokens[cut:]
    assert run.count("episodes_resumed_total") == 1


# --- heartbeats and ends ----------------------------------------------------------------------------------------------


async def test_heartbeats_name_exactly_the_running_leases(running: Start) -> None:
    async with running() as run:
        hold = run.engine.hold_at(run.prompt_tokens + 2)
        run.broker.grant(*leases(3))
        beat = await run.broker.heartbeat_with(LeaseKey(1, 1), LeaseKey(2, 1), LeaseKey(3, 1))
        assert (beat.status, beat.policy_version) == ("serving", 3)
        await run.broker.send(LeaseEnded(trajectory_id=2, epoch=1, reason="group dropped"))
        await run.broker.heartbeat_with(LeaseKey(1, 1), LeaseKey(3, 1))
        hold.go.set()
        await run.broker.until(lambda: set(run.broker.of(Heartbeat)[-1].leases) == set())
    assert {finish.trajectory_id for finish in run.broker.of(Finish)} == {1, 3}
    assert run.broker.ended(2) == []
    assert 2 not in run.broker.chunks
    assert run.count("episodes_total", outcome="lease_ended") == 1


async def test_the_end_of_another_epoch_ends_nothing(running: Start) -> None:
    async with running() as run:
        hold = run.engine.hold_at(run.prompt_tokens + 2)
        run.broker.grant(a_new_lease(trajectory_id=1, epoch=5))
        await hold.reached.wait()
        await run.broker.send(LeaseEnded(trajectory_id=1, epoch=4, reason="expired"))
        await run.broker.send(LeaseEnded(trajectory_id=2, epoch=5, reason="expired"))
        await run.broker.heartbeat_with(LeaseKey(1, 5))
        hold.go.set()
        await run.broker.expect(Finish)


async def test_a_newer_lease_replaces_the_older_one_and_a_repeated_or_older_one_changes_nothing(running: Start) -> None:
    async with running() as run:
        hold = run.engine.hold_at(run.prompt_tokens + 2)
        old, new = a_new_lease(trajectory_id=1, epoch=1), a_new_lease(trajectory_id=1, epoch=2)
        run.broker.grant(old)
        await hold.reached.wait()
        hold = run.engine.hold_at(run.prompt_tokens + 2)
        for lease in (new, new, old):
            run.broker.grant(lease)
            await run.broker.send(*run.broker.leases.pop())
        await hold.reached.wait()
        await run.broker.heartbeat_with(LeaseKey(1, 2))
        assert len(run.engine.requests) == 2
        assert run.engine.num_closed == 1
        hold.go.set()
        assert (await run.broker.expect(Finish)).epoch == 2
    assert [finish.epoch for finish in run.broker.of(Finish)] == [2]
    assert [chunk.epoch for chunk, _ in run.broker.chunks[1]] == [2]


async def test_a_failed_episode_is_released_as_failed_with_its_reason(running: Start) -> None:
    async with running() as run:
        run.broker.grant(a_new_lease(task={"no question": 1}))
        release = await run.broker.expect(Release)
        assert release.failed
        assert release.reason == "environment start failed: KeyError: 'question'"
    assert run.count("episodes_total", outcome="failed") == 1


async def test_what_an_engine_made_before_it_failed_is_sent_and_the_lease_goes_back_without_blame(running: Start) -> None:
    async with running() as run:
        run.engine.failures[run.prompt_tokens + 5] = EngineUnreachable("connection broke")
        run.broker.grant(a_new_lease())
        release = await run.broker.expect(Release)
        assert not release.failed
        assert release.reason == "engine: connection broke"
        # Pieces of four tokens: the fifth was under way when the connection broke.
        assert len(whole(run.broker.chunks[7]).token_ids) == run.prompt_tokens + 4


async def test_an_engine_that_keeps_failing_ends_the_process(tokenizer: ChatTokenizer) -> None:
    async with zmq_context() as context:
        run = Running(context, tokenizer, WORK, 5.0, 1)
        run.engine.next_token = _broken
        run.broker.grant(*leases(ENGINE_FAILURES_ALLOWED))
        with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012 - the end of the service is what is tested
            async with in_background(run.broker.serve()), asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
                tasks.create_task(run.service.run(run.stop))
                for number in range(1, ENGINE_FAILURES_ALLOWED + 1):
                    await run.broker.expect(Release, number)
                    run.clock.advance(2.0)
        errors = flatten(caught.value)
        assert [str(error) for error in errors if isinstance(error, ServiceError)] == ["the engine keeps failing: gone"]


def _broken(_: Any) -> int:
    raise EngineUnreachable("gone")


# --- the broker is not there yet ------------------------------------------------------------------------------------------


async def test_a_rollout_that_never_reached_the_broker_says_where_it_looked_and_for_how_long(
    tokenizer: ChatTokenizer,
) -> None:
    async with zmq_context() as context:
        run = Running(context, tokenizer, WORK, 5.0, 1)
        run.sync.policy_version = 0
        run.clock.advance(42.0)
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(run.service.run(run.stop))
            await run.broker.end.channel.receive()
            answer = f"no answer from the broker at {run.broker.endpoint} for 42 s"
            assert run.health.ready() == (False, answer)
            run.clock.advance(2.0)
            async with in_background(run.broker.serve()):
                await run.heartbeats(2)
                assert run.health.ready() == (False, "starting")
                run.stop.set()


# --- the broker goes away and comes back --------------------------------------------------------------------------------


async def test_a_broker_that_was_started_again_gets_everything_that_it_did_not_acknowledge(running: Start) -> None:
    async with running() as run:
        run.broker.acknowledges = False
        run.broker.grant(a_new_lease(trajectory_id=1))
        await run.broker.expect(Finish)
        before = list(run.broker.messages)
        run.broker.restart()
        run.broker.acknowledges = True
        run.broker.grant(a_new_lease(trajectory_id=2))
        # The next heartbeat is refused; then everything comes again, and leases are asked for at once.
        await run.broker.until(lambda: len(run.broker.of(Finish)) == 3)
        assert run.broker.num_hellos == 2
        again = run.broker.messages[len(before) :]
        assert [m for m in again if isinstance(m, Finish) and m.trajectory_id == 1] == run.broker.of(Finish)[:1]
        first, second = run.broker.chunks[1]
        assert first[0] == second[0]
        assert run.broker.of(Finish)[-1].trajectory_id == 2
    assert run.client.num_unacknowledged == 0


async def test_a_silent_broker_makes_the_rollout_not_ready_until_it_speaks(running: Start) -> None:
    async with running() as run:
        await run.broker.until(lambda: run.health.ready()[0])
        run.broker.answers = False

        def away_after_another_silence() -> bool:
            run.clock.advance(BROKER_SILENT_S + 0.1)
            return run.health.ready() == (False, "the broker is away")

        await run.broker.until(away_after_another_silence)
        run.broker.answers = True
        await run.broker.until(lambda: run.health.ready()[0])


async def test_an_engine_that_makes_no_tokens_makes_the_rollout_not_ready(running: Start) -> None:
    async with running() as run:
        hold = run.engine.hold_at(run.prompt_tokens + 2)
        run.broker.grant(a_new_lease())
        await run.broker.heartbeat_with(LeaseKey(7, 1))
        await run.heartbeats(2)
        for _ in range(3):
            run.clock.advance(4.0)
            await run.broker.until(lambda: run.client.silent_s == 0)
            await run.heartbeats(2)
        ready, reason = run.health.ready()
        assert not ready
        assert reason.startswith("no progress for 12 s")
        assert run.health.alive()[0]
        hold.go.set()
        await run.broker.until(lambda: run.health.ready()[0])


# --- draining ---------------------------------------------------------------------------------------------------------


async def test_a_drain_hands_every_unfinished_token_back_and_then_the_lease(running: Start) -> None:
    async with running() as run:
        hold = run.engine.hold_at(run.prompt_tokens + 4)
        run.broker.grant(*leases(3))
        await hold.reached.wait()
        await run.broker.heartbeat_with(LeaseKey(1, 1), LeaseKey(2, 1), LeaseKey(3, 1))
        run.stop.set()
    for trajectory_id in (1, 2, 3):
        assert len(whole(run.broker.chunks[trajectory_id]).token_ids) == run.prompt_tokens + 4
        (release,) = run.broker.ended(trajectory_id)
        assert isinstance(release, Release)
        assert (release.reason, release.failed) == ("draining", False)
        place = run.broker.messages.index(release)
        assert run.broker.messages.index(run.broker.chunks[trajectory_id][-1][0]) < place
    assert run.broker.of(Heartbeat)[-1].status == "draining"
    assert run.client.num_unacknowledged == 0
    assert run.engine.num_closed == 3
    assert run.count("episodes_total", outcome="handed_back") == 3


async def test_a_lease_that_arrives_while_draining_goes_straight_back(running: Start) -> None:
    async with running(drain_s=20.0) as run:
        hold = run.engine.hold_at(run.prompt_tokens)
        run.broker.grant(a_new_lease(trajectory_id=1))
        await hold.reached.wait()
        run.broker.acknowledges = False
        run.stop.set()
        await run.broker.expect(Release)
        await run.broker.send(a_new_lease(trajectory_id=2), no_tokens())
        late = await run.broker.expect(Release, 2)
        assert (late.trajectory_id, late.failed) == (2, False)
        assert len(run.engine.requests) == 1
        # The drain ends when all three messages are acknowledged.
        await run.broker.send(Ack(next_seq=3))


@pytest.mark.parametrize("window", [1, 256])
async def test_a_drain_keeps_its_budget_when_the_broker_acknowledges_nothing(window: int, running: Start) -> None:
    spec = msgspec.structs.replace(WORK, window=window)
    async with running(spec, drain_s=0.2) as run:
        hold = run.engine.hold_at(run.prompt_tokens + 4)
        run.broker.acknowledges = False
        run.broker.grant(*leases(3))
        await run.broker.heartbeat_with(LeaseKey(1, 1), LeaseKey(2, 1), LeaseKey(3, 1))
        await hold.reached.wait()
        begin = asyncio.get_running_loop().time()
        run.stop.set()
    assert asyncio.get_running_loop().time() - begin < 5.0
    assert run.client.num_unacknowledged == min(window, 6)


async def test_the_end_of_the_run_ends_the_rollout(running: Start) -> None:
    async with running() as run:
        run.broker.pulse = Pulse(policy_version=1, weights_endpoint="", stopping=True)
        await run.broker.until(lambda: run.broker.messages and _status(run) == "draining")
        assert not run.stop.is_set()


def _status(run: Running) -> str:
    beats = run.broker.of(Heartbeat)
    return beats[-1].status if beats else ""
