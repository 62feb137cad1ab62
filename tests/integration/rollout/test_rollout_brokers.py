"""A rollout between three scripted brokers that share a run, and a scripted engine, over real ZeroMQ."""

import asyncio

import msgspec
import pytest

from gspo_protocol.channels import WORK
from gspo_protocol.messages import Chunk, Finish, Heartbeat, Lease, LeaseKey, LeaseRequest, Message, Pulse, Release
from gspo_services.rollout.broker import SILENT_S
from gspo_services.rollout.several import BeatsInTurn
from gspo_services.rollout.tokenizer import ChatTokenizer
from tests.support.broker.process import eventually
from tests.support.broker.scripted_broker import ScriptedBroker
from tests.support.engines.chat_models import TINY_TEMPLATE, chat_tokenizer, save_chat_model
from tests.support.episodes import a_new_lease, no_tokens, whole
from tests.support.processes.running_rollout import TURN_TOKENS, Running, Start, starter
from tests.support.wire.zmq_ends import PATIENCE_S, in_background, zmq_context

NUM_BROKERS = 3


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer(save_chat_model(tmp_path_factory.mktemp("model"), chat_tokenizer(TINY_TEMPLATE, "<|end|>")))


@pytest.fixture
def running(tokenizer: ChatTokenizer) -> Start:
    return starter(tokenizer)


def leases_of(broker: int, number: int) -> list[Lease]:
    """Leases of a broker's new trajectories."""
    return [a_new_lease(trajectory_id=broker + NUM_BROKERS * index) for index in range(1, number + 1)]


def a_pulse(policy_version: int = 3, *, stopping: bool = False) -> Pulse:
    return Pulse(policy_version=policy_version, weights_endpoint=f"tcp://w:{policy_version}", stopping=stopping)


class NeverDue(BeatsInTurn):
    num_beats = 0

    def next(self) -> list[int]:
        self.num_beats += 1
        return []


def of_episodes(messages: list[Message]) -> set[int]:
    return {each.trajectory_id for each in messages if isinstance(each, Chunk | Finish | Release)}


def status_of(broker: ScriptedBroker) -> str:
    """What the rollout has said last; empty: nothing."""
    beats = broker.of(Heartbeat)
    return beats[-1].status if beats else ""


async def all_held(run: Running) -> None:
    """Wait until each broker's three leases are at work."""
    for number, broker in enumerate(run.scripted):
        await broker.heartbeat_with(*(LeaseKey(lease.trajectory_id, 1) for lease in leases_of(number, 3)))


async def all_there(run: Running) -> None:
    """Serve nothing until every broker has answered, so that all can be asked from the first time on."""
    run.sync.serve(0)
    for broker in run.scripted:
        await broker.expect(Heartbeat, 2)
    run.sync.serve(3)


async def wait_for(run: Running, broker: int, reason: str) -> None:
    """Wait until the rollout says why it is not ready; each of the broker's messages is a moment to look."""
    await run.scripted[broker].until(lambda: run.health.ready() == (not reason, reason or "ready"))


async def test_each_broker_gets_its_share_of_the_places_and_what_is_its_own(running: Start) -> None:
    async with running(max_running=9, num_brokers=NUM_BROKERS) as run:
        hold = run.engine.hold_at(run.prompt_tokens)
        for number, broker in enumerate(run.scripted):
            broker.pulse = a_pulse()
            broker.grant(*leases_of(number, 3))
        await all_there(run)
        await all_held(run)
        assert [broker.of(LeaseRequest)[0].capacity for broker in run.scripted] == [3, 3, 3]
        hold.go.set()
        for number, broker in enumerate(run.scripted):
            await broker.expect(Finish, 3)
            assert set(broker.chunks) == {lease.trajectory_id for lease in leases_of(number, 3)}
            assert all(
                whole(chunks).kinds[-TURN_TOKENS:] == [("action", 0)] * TURN_TOKENS for chunks in broker.chunks.values()
            )
    for number, broker in enumerate(run.scripted):
        mine = {lease.trajectory_id for lease in leases_of(number, 3)}
        assert {finish.trajectory_id for finish in broker.of(Finish)} == mine
        named = {lease.trajectory_id for beat in broker.of(Heartbeat) for lease in beat.leases}
        assert named == mine


async def test_brokers_hear_of_a_change_before_their_heartbeat_is_due(running: Start) -> None:
    beats = NeverDue(NUM_BROKERS, lease_s=15.0, heartbeat_s=0.05)
    async with running(num_brokers=NUM_BROKERS, beats=beats) as run:
        run.sync.serve(0, quarantined="the engine does not hold what was sent")
        await eventually(lambda: all(status_of(broker) == "quarantined" for broker in run.scripted))
        heard, beaten = [len(broker.of(Heartbeat)) for broker in run.scripted], beats.num_beats
        await eventually(lambda: beats.num_beats > beaten + 2)
        assert [len(broker.of(Heartbeat)) for broker in run.scripted] == heard


async def test_places_of_a_broker_without_work_go_to_the_others_and_never_more_than_there_are(running: Start) -> None:
    async with running(max_running=6, num_brokers=NUM_BROKERS) as run:
        hold = run.engine.hold_at(run.prompt_tokens)
        for broker in run.scripted:
            broker.pulse = a_pulse()
        run.scripted[1].grant(*leases_of(1, 6))
        await all_there(run)
        await run.scripted[1].heartbeat_with(*(LeaseKey(lease.trajectory_id, 1) for lease in leases_of(1, 6)))
        assert [broker.of(LeaseRequest)[0].capacity for broker in run.scripted] == [2, 2, 2]
        assert run.count("episodes_running") == 6
        surplus = a_new_lease(trajectory_id=5)
        await run.scripted[2].send(surplus, no_tokens())
        release = await run.scripted[2].expect(Release)
        assert (release.trajectory_id, release.reason) == (5, "no room")
        assert [of_episodes(broker.messages) for broker in (run.scripted[0], run.scripted[2])] == [set(), {5}]
        hold.go.set()


async def test_a_broker_that_is_away_is_named_and_holds_up_nothing_but_its_own_trajectories(running: Start) -> None:
    async with running(max_running=3, num_brokers=NUM_BROKERS) as run:
        for number, broker in enumerate(run.scripted):
            broker.pulse = a_pulse()
            broker.grant(*leases_of(number, 1))
        away = run.scripted[2]
        away.acknowledges = False
        await all_there(run)
        for broker in run.scripted:
            await broker.expect(Finish)
        await run.brokers.acknowledged(0)
        await run.brokers.acknowledged(1)
        sent = [each for each in away.messages if isinstance(each, Chunk | Finish)]
        assert run.brokers.num_unacknowledged == len(sent) >= 2
        away.is_away = True

        def is_named() -> bool:
            if run.brokers.clients[2].silent_s < SILENT_S:
                run.clock.advance(SILENT_S + 0.1)
            return run.health.ready() == (False, f"broker 2 at {away.endpoint} is away")

        await run.scripted[0].until(is_named)
        for number, broker in enumerate(run.scripted[:2]):
            broker.grant(*leases_of(number, 4)[1:])
        run.clock.advance(60.0)
        for broker in run.scripted[:2]:
            await broker.expect(Finish, 4)
        away.grant(*leases_of(2, 2)[1:])
        away.restart()
        away.acknowledges, away.is_away = True, False

        def has_caught_up() -> bool:
            run.clock.advance(1.0)  # A handshake is tried once a second.
            return 8 in of_episodes(away.of(Finish))

        await run.scripted[0].until(has_caught_up)
        first, again = (finish for finish in away.of(Finish) if finish.trajectory_id == 5)
        assert first == again
        await wait_for(run, 2, "")
    assert of_episodes(away.messages) == {5, 8}
    assert run.brokers.num_unacknowledged == 0


async def test_brokers_that_never_answered_are_named(tokenizer: ChatTokenizer) -> None:
    async with zmq_context() as context:
        run = Running(context, tokenizer, WORK, 5.0, 1, NUM_BROKERS)
        run.sync.policy_version = 0
        run.clock.advance(42.0)
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
            async with in_background(run.scripted[0].serve(), run.scripted[2].serve()):
                tasks.create_task(run.serve(run.environment_loop()))
                await wait_for(run, 0, f"no answer from broker 1 at {run.scripted[1].endpoint} for 42 s")
                run.stop.set()
                await run.scripted[0].until(lambda: run.scripted[0].of(Heartbeat)[-1].status == "draining")


async def test_a_version_counts_when_every_broker_has_announced_it(running: Start) -> None:
    async with running(num_brokers=NUM_BROKERS) as run:
        run.scripted[0].pulse, run.scripted[1].pulse, run.scripted[2].pulse = a_pulse(5), a_pulse(3), a_pulse(4)
        for broker in run.scripted:
            await broker.expect(Heartbeat, 3)
        begun = len(run.sync.announced)
        run.sync.serve(0)
        waits = "no version that all brokers know yet: broker 0 has 5, broker 1 has 3, broker 2 has 4"
        await wait_for(run, 0, waits)
        run.scripted[1].pulse = run.scripted[2].pulse = a_pulse(5)
        await run.scripted[1].until(lambda: run.sync.announced[-1] == (5, "tcp://w:5"))
        run.scripted[2].pulse = a_pulse(6)
        heard = len(run.scripted[2].of(Heartbeat))
        await run.scripted[2].expect(Heartbeat, heard + 3)
    assert {version for version, _ in run.sync.announced[begun:]} == {0, 5}


async def test_a_broker_that_has_not_heard_of_the_served_version_is_asked_for_nothing(running: Start) -> None:
    async with running(max_running=4, num_brokers=NUM_BROKERS) as run:
        behind = run.scripted[1]
        for broker in run.scripted:
            broker.pulse = a_pulse()
        behind.pulse = a_pulse(2)
        behind.grant(*leases_of(1, 2))
        await behind.expect(Heartbeat, 3)
        assert {beat.status for beat in behind.of(Heartbeat)} == {"verifying"}
        assert behind.of(LeaseRequest) == []
        for broker in (run.scripted[0], run.scripted[2]):
            await broker.expect(LeaseRequest)
            assert broker.of(Heartbeat)[-1].status == "serving"
        run.clock.advance(60.1)
        behind.pulse = a_pulse(3)
        await behind.expect(Finish, 2)
        assert behind.of(Heartbeat)[-1].status == "serving"


async def test_a_run_is_over_when_every_broker_says_so_and_who_says_so_alone_is_not_asked_again(running: Start) -> None:
    async with running(num_brokers=NUM_BROKERS) as run:
        for broker in run.scripted:
            broker.pulse = a_pulse()
            await broker.expect(LeaseRequest)
        stopping = run.scripted[1]
        stopping.pulse = a_pulse(stopping=True)
        await stopping.expect(Heartbeat, len(stopping.of(Heartbeat)) + 3)
        for number, broker in enumerate(run.scripted):
            broker.grant(*leases_of(number, 1))
        run.clock.advance(60.1)
        for broker in (run.scripted[0], run.scripted[2]):
            await broker.expect(Finish)
        assert len(stopping.of(LeaseRequest)) == 1
        run.scripted[0].pulse = a_pulse(stopping=True)
        await run.scripted[0].expect(Heartbeat, len(run.scripted[0].of(Heartbeat)) + 3)
        assert run.scripted[0].of(Heartbeat)[-1].status == "serving"
        run.scripted[2].pulse = a_pulse(stopping=True)
        await run.scripted[2].until(lambda: run.scripted[2].of(Heartbeat)[-1].status == "draining")
        assert not run.stop.is_set()


@pytest.mark.parametrize("away", range(NUM_BROKERS))
async def test_a_drain_hands_back_to_the_brokers_that_are_there_while_one_takes_nothing(running: Start, away: int) -> None:
    spec = msgspec.structs.replace(WORK, window=1)
    async with running(spec, drain_s=2.0, max_running=9, num_brokers=NUM_BROKERS) as run:
        hold = run.engine.hold_at(run.prompt_tokens + 4)
        run.scripted[away].acknowledges = False
        for number, broker in enumerate(run.scripted):
            broker.pulse = a_pulse()
            broker.grant(*leases_of(number, 3))
        await hold.reached.wait()
        await all_held(run)
        run.stop.set()
    for number, broker in enumerate(run.scripted):
        assert _handed_back(broker) == ({lease.trajectory_id for lease in leases_of(number, 3)} if number != away else set())
    assert run.brokers.clients[away].num_unacknowledged == 1


def _handed_back(broker: ScriptedBroker) -> set[int]:
    return {release.trajectory_id for release in broker.of(Release) if release.reason == "draining"}
