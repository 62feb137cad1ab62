"""A rollout with a failing engine, with a silent or absent broker, or with a request to stop."""

import asyncio
from typing import Any

import msgspec
import pytest

from gspo_protocol.channels import WORK
from gspo_protocol.messages import (
    Ack,
    Finish,
    Heartbeat,
    LeaseKey,
    Pulse,
    Release,
)
from gspo_services.rollout.broker import SILENT_S
from gspo_services.rollout.service import ENGINE_FAILURES_ALLOWED
from gspo_services.rollout.sglang.client import EngineUnreachable
from gspo_services.rollout.tokenizer import ChatTokenizer
from gspo_services.shared.runtime.errors import ServiceError, flatten
from tests.support.engines.chat_models import TINY_TEMPLATE, chat_tokenizer, save_chat_model
from tests.support.episodes import a_new_lease, no_tokens, whole
from tests.support.processes.running_rollout import Running, Start, leases, starter
from tests.support.wire.zmq_ends import PATIENCE_S, in_background, zmq_context


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer(save_chat_model(tmp_path_factory.mktemp("model"), chat_tokenizer(TINY_TEMPLATE, "<|end|>")))


@pytest.fixture
def running(tokenizer: ChatTokenizer) -> Start:
    return starter(tokenizer)


async def test_a_failed_episode_is_released_as_failed_with_its_reason(running: Start) -> None:
    async with running() as run:
        run.broker.grant(a_new_lease(task={"no question": 1}))
        release = await run.broker.expect(Release)
        assert release.failed
        assert release.reason == "environment start failed: KeyError: 'question'"
    assert run.count("episodes_total", outcome="failed") == 1


async def test_tokens_from_before_a_failure_of_the_engine_are_sent_and_the_lease_goes_back_without_blame(
    running: Start,
) -> None:
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
                tasks.create_task(run.serve(run.environment_loop()))
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
            tasks.create_task(run.serve(run.environment_loop()))
            await run.broker.end.channel.receive()
            answer = f"no answer from the broker at {run.broker.endpoint} for 42 s"
            assert run.health.ready() == (False, answer)
            run.clock.advance(2.0)
            async with in_background(run.broker.serve()):
                await run.heartbeats(2)
                assert run.health.ready() == (False, "starting")
                run.stop.set()


# --- the broker goes away and comes back --------------------------------------------------------------------------------


async def test_a_restarted_broker_gets_everything_that_it_had_not_acknowledged(running: Start) -> None:
    async with running() as run:
        run.broker.acknowledges = False
        run.broker.grant(a_new_lease(trajectory_id=1))
        await run.broker.expect(Finish)
        before = list(run.broker.messages)
        run.broker.restart()
        run.broker.acknowledges = True
        run.broker.grant(a_new_lease(trajectory_id=2))
        # The next heartbeat is refused; then everything is sent again, and the rollout asks for leases at once.
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
            run.clock.advance(SILENT_S + 0.1)
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


async def test_a_drain_hands_back_what_the_engine_had_not_sent_yet(running: Start) -> None:
    async with running() as run:
        run.engine.stops_when_told = True
        hold = run.engine.hold_at(run.prompt_tokens + 5)
        run.broker.grant(*leases(3))
        await hold.reached.wait()
        await run.broker.heartbeat_with(LeaseKey(1, 1), LeaseKey(2, 1), LeaseKey(3, 1))
        run.stop.set()
    for trajectory_id in (1, 2, 3):
        # Pieces have 4 tokens: the last came because the engine was asked for them.
        assert len(whole(run.broker.chunks[trajectory_id]).token_ids) == run.prompt_tokens + 5
        (release,) = run.broker.ended(trajectory_id)
        assert isinstance(release, Release)
        assert (release.reason, release.failed) == ("draining", False)
    assert run.count("episodes_total", outcome="handed_back") == 3
    assert run.count("episodes_total", outcome="engine_error") == 0


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
    async with running(spec, drain_s=1.0) as run:
        hold = run.engine.hold_at(run.prompt_tokens + 4)
        run.broker.acknowledges = False
        run.broker.grant(*leases(3))
        await run.broker.heartbeat_with(LeaseKey(1, 1), LeaseKey(2, 1), LeaseKey(3, 1))
        await hold.reached.wait()
        begin = asyncio.get_running_loop().time()
        run.stop.set()
    assert asyncio.get_running_loop().time() - begin < 30.0
    assert run.client.num_unacknowledged == min(window, 6)


async def test_the_end_of_the_run_ends_the_rollout(running: Start) -> None:
    async with running() as run:
        run.broker.pulse = Pulse(policy_version=1, weights_endpoint="", stopping=True)
        await run.broker.until(lambda: run.broker.messages and _status(run) == "draining")
        assert not run.stop.is_set()


def _status(run: Running) -> str:
    beats = run.broker.of(Heartbeat)
    return beats[-1].status if beats else ""
