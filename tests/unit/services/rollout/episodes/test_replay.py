"""Wherever an agent's episode is cut off, another rollout ends it with the same tokens, and samples none of them again."""

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from gspo_protocol.messages import Journal
from gspo_services.rollout.endpoint import CallAnswer
from gspo_services.rollout.episodes import EpisodeCalls, WrongTurns
from gspo_services.rollout.rendering import Renderer
from gspo_services.rollout.work import EpisodeFailed
from gspo_services.tasks.agents import RecordedStep
from tests.support.agent_episodes import (
    LedgerBroker,
    an_episode,
    ask,
    contexts_of,
    counted,
    echoed,
    sampling_of,
    shared_of,
    user,
)
from tests.support.engines.scripted_engine import ScriptedEngine
from tests.unit.services.rollout.episodes.conftest import stopping

SAMPLING = sampling_of()


async def an_agent(calls: EpisodeCalls, recorded: list[Any]) -> list[CallAnswer]:
    """A conversation with a step in it, a compaction, and two calls side by side."""
    first = await ask(calls, [user("a")])
    second = await ask(calls, [user("a"), echoed(first), user("b")])
    if not recorded:
        await calls.steps.record(RecordedStep("search", "d", {"rows": [1, 2]}), 0)
    third = await ask(calls, [user("summary of all that")], max_tokens=5)
    async with asyncio.TaskGroup() as tasks:
        beside = [
            tasks.create_task(ask(calls, [user("a"), echoed(first), user("b"), echoed(second), user(x)])) for x in "cd"
        ]
    return [first, second, third, *(task.result() for task in beside)]


async def run(broker: LedgerBroker, renderer: Renderer, engine: ScriptedEngine) -> list[CallAnswer] | None:
    """None when the broker keeps no more: then this process is killed."""
    shared = shared_of(renderer, broker, engine)
    async with an_episode(shared, broker.lease()) as calls:
        async with asyncio.TaskGroup() as tasks:
            agent = tasks.create_task(an_agent(calls, list(calls.steps.recorded)))
            full = tasks.create_task(broker.full.wait())
            await asyncio.wait((agent, full), return_when=asyncio.FIRST_COMPLETED)
            killed = not agent.done() or broker.full.is_set()
            full.cancel()
            agent.cancel()
        if killed:
            return None
        await calls.finish(0.5)
        return None if broker.full.is_set() else agent.result()


def by_context(broker: LedgerBroker) -> list[list[tuple[str, int]]]:
    """The sequences, in whichever order they began."""
    return sorted(broker.sequences().values())


def an_engine(engine: ScriptedEngine) -> ScriptedEngine:
    return ScriptedEngine(engine.next_token, piece_tokens=3)


async def test_a_killed_episode_ends_as_one_that_was_not(renderer: Renderer, engine: ScriptedEngine) -> None:
    expected = LedgerBroker(SAMPLING)
    answers = await run(expected, renderer, engine)
    assert answers is not None
    assert any(isinstance(message, Journal) and "step" in message.entry for message in expected.messages)
    for kept in range(len(expected.messages)):
        cut = LedgerBroker(SAMPLING, keeps=kept)
        assert await run(cut, renderer, an_engine(engine)) is None
        resumed, second = cut.resumed(), an_engine(engine)
        complete = {tuple(tokens) for tokens in cut.sequences().values()}
        again = await run(resumed, renderer, second)
        assert again is not None
        assert by_context(resumed) == by_context(expected), kept
        assert [each.token_ids for each in again] == [each.token_ids for each in answers]
        assert resumed.finish is not None
        assert resumed.finish.turn_rewards == [0.0] * 4 + [0.5]
        # Of each sequence, the engine is asked to go on only from where the log had ended.
        sampled = {tuple(request.input_ids) for request in second.requests}
        for tokens in complete:
            inner = [tuple(t for _, t in tokens[:place]) for place in range(len(tokens)) if tokens[place][0] == "action"]
            assert not sampled & set(inner), kept
        recorded = {entry["call"]["id"] for entry in cut.entries if "call" in entry}
        assert len(recorded - {each.id for each in again}) <= 1, "only the last record may have had no tokens"


async def test_recorded_answers_are_the_same_and_need_no_engine(renderer: Renderer, engine: ScriptedEngine) -> None:
    whole = LedgerBroker(SAMPLING)
    shared = shared_of(renderer, whole, engine)
    async with an_episode(shared, whole.lease()) as calls:
        answers = await an_agent(calls, [])
    resumed, second = whole.resumed(), an_engine(engine)
    again = await run(resumed, renderer, second)
    assert again == answers
    assert second.requests == []


async def test_what_an_agent_does_not_repeat_is_discarded_and_counted(renderer: Renderer, engine: ScriptedEngine) -> None:
    broker = LedgerBroker(SAMPLING)
    async with an_episode(shared_of(renderer, broker, engine), broker.lease()) as calls:
        first = await ask(calls, [user("a")])
        await ask(calls, [user("a"), echoed(first), user("it is noon")])
        third = await ask(calls, [user("side question")])
    broker, second = broker.resumed(), an_engine(engine)
    shared = shared_of(renderer, broker, second)
    async with an_episode(shared, broker.lease()) as calls:
        assert await ask(calls, [user("a")]) == first
        other = await ask(calls, [user("a"), echoed(first), user("it is one o'clock")])
        assert await ask(calls, [user("side question")]) == third, "what is asked alike is answered alike, in any order"
        await calls.finish(1.0)
    assert len(second.requests) == 1
    assert broker.finish is not None
    # Turns are numbered as they began: the second one is of noon, and the agent's last is the fourth.
    assert (broker.finish.discarded_turns, broker.finish.turn_rewards) == ([1], [0.0, 0.0, 0.0, 1.0])
    assert contexts_of(broker)[tuple(second.requests[0].input_ids)] == other.token_ids[0]
    assert (counted(shared.metrics.divergences), counted(shared.metrics.turns_discarded)) == (1, 1)
    assert counted(shared.metrics.calls_replayed) == 2


async def test_rewards_of_turns_follow_the_agents_own_order_and_leave_out_what_it_did_not_repeat(
    renderer: Renderer, engine: ScriptedEngine
) -> None:
    broker = LedgerBroker(SAMPLING)
    async with an_episode(shared_of(renderer, broker, engine), broker.lease()) as calls:
        first = await ask(calls, [user("a")])
        await ask(calls, [user("a"), echoed(first), user("it is noon")])
        await ask(calls, [user("side question")])
    broker = broker.resumed()
    async with an_episode(shared_of(renderer, broker, an_engine(engine)), broker.lease()) as calls:
        await ask(calls, [user("a")])
        await ask(calls, [user("a"), echoed(first), user("it is one o'clock")])
        await ask(calls, [user("side question")])
        for number in (2, 4):
            with pytest.raises(WrongTurns, match=rf"rewards {number} turns .* and the policy answered 3 times"):
                await calls.finish(1.0, turns=[0.5] * number)
        await calls.finish(1.75, turns=[0.25, 0.5, 1.0])
    assert broker.finish is not None
    # The side question was the third turn, and one o'clock is the fourth.
    assert (broker.finish.discarded_turns, broker.finish.turn_rewards) == ([1], [0.25, 0.0, 1.0, 0.5])


async def test_an_agent_may_diverge_again_and_again(renderer: Renderer, engine: ScriptedEngine) -> None:
    broker = LedgerBroker(SAMPLING)
    for clock in range(4):
        shared = shared_of(renderer, broker, an_engine(engine))
        async with an_episode(shared, broker.lease()) as calls:
            first = await ask(calls, [user("a")])
            await ask(calls, [user("a"), echoed(first), user(f"it is {clock}")])
            if clock == 3:
                await calls.finish(1.0)
        broker = broker if clock == 3 else broker.resumed()
    assert broker.finish is not None
    assert (broker.finish.discarded_turns, broker.finish.turn_rewards) == ([1, 2, 3], [0.0] * 4 + [1.0])


async def test_an_agent_that_repeats_nothing_must_do_something_else(renderer: Renderer, engine: ScriptedEngine) -> None:
    broker = LedgerBroker(SAMPLING)
    async with an_episode(shared_of(renderer, broker, engine), broker.lease()) as calls:
        await ask(calls, [user("a")])
    broker = broker.resumed()
    async with an_episode(shared_of(renderer, broker, engine), broker.lease()) as calls:
        with pytest.raises(EpisodeFailed, match="made no call"):
            await calls.finish(1.0)
    assert broker.finish is None


async def test_equal_calls_are_answered_in_their_order(renderer: Renderer, engine: ScriptedEngine) -> None:
    broker = LedgerBroker(SAMPLING)
    async with an_episode(shared_of(renderer, broker, engine), broker.lease()) as calls:
        recorded = [await ask(calls, [user("a")]) for _ in range(3)]
    broker, second = broker.resumed(), an_engine(engine)
    async with an_episode(shared_of(renderer, broker, second), broker.lease()) as calls:
        assert [await ask(calls, [user("a")]) for _ in range(3)] == recorded
        await calls.finish(1.0)
    assert second.requests == []


async def test_a_restarted_agent_gets_nothing_of_before(renderer: Renderer, engine: ScriptedEngine) -> None:
    broker = LedgerBroker(SAMPLING)
    async with an_episode(shared_of(renderer, broker, engine), broker.lease()) as calls:
        recorded = await ask(calls, [user("a")])
        await calls.steps.record(RecordedStep("search", "d", 1), 0)
    broker, second = broker.resumed(), an_engine(engine)
    shared = shared_of(renderer, broker, second, on_replay="restart")
    async with an_episode(shared, broker.lease()) as calls:
        assert calls.steps.recorded == []
        assert (await ask(calls, [user("a")])).id != recorded.id
        await calls.finish(1.0)
    assert len(second.requests) == 1
    assert broker.finish is not None
    assert (broker.finish.discarded_turns, broker.finish.turn_rewards) == ([0], [0.0, 1.0])
    assert counted(shared.metrics.divergences) == 0, "nothing was to be repeated"


async def test_an_episode_whose_files_cannot_be_made_again_begins_again(renderer: Renderer, engine: ScriptedEngine) -> None:
    broker = LedgerBroker(SAMPLING)
    answer = {"exit_code": 0, "output": "", "limit": None}
    async with an_episode(shared_of(renderer, broker, engine), broker.lease()) as calls:
        recorded = await ask(calls, [user("a")])
        await calls.steps.record(RecordedStep("computer.run", "d", {"answer": answer, "files": None}), 0)
    broker, second = broker.resumed(), an_engine(engine)
    with capture_logs() as logged:
        async with an_episode(shared_of(renderer, broker, second), broker.lease()) as calls:
            assert calls.steps.recorded == []
            assert (await ask(calls, [user("a")])).id != recorded.id
            await calls.finish(1.0)
    assert [line["step"] for line in logged if line["event"] == "episode_begins_again"] == [0]
    assert len(second.requests) == 1


async def test_a_step_that_differs_replaces_what_was_recorded_from_there_on(
    renderer: Renderer, engine: ScriptedEngine
) -> None:
    broker = LedgerBroker(SAMPLING)
    shared = shared_of(renderer, broker, engine)
    steps = [RecordedStep(name, name, ord(name)) for name in "abcd"]
    async with an_episode(shared, broker.lease()) as calls:
        for ordinal, step in enumerate(steps):
            await calls.steps.record(step, ordinal)
    broker = broker.resumed()
    shared = shared_of(renderer, broker, engine)
    other = RecordedStep("x", "", 0)
    async with an_episode(shared, broker.lease()) as calls:
        assert calls.steps.recorded == steps
        with capture_logs() as logged:
            await calls.steps.diverged(1, "b", "x")
        assert [(line["event"], line["trajectory_id"]) for line in logged] == [("agent_diverged", calls.log.trajectory_id)]
        await calls.steps.record(other, 1)
    assert counted(shared.metrics.divergences) == 1
    async with an_episode(shared_of(renderer, broker, engine), broker.resumed().lease()) as calls:
        assert calls.steps.recorded == [steps[0], other]


async def test_calls_side_by_side_may_come_in_another_order(renderer: Renderer, engine: ScriptedEngine) -> None:
    broker = LedgerBroker(SAMPLING)
    async with an_episode(shared_of(renderer, broker, engine), broker.lease()) as calls:
        recorded = await ask(calls, [user("b")])
    broker = broker.resumed()
    async with an_episode(shared_of(renderer, broker, an_engine(engine)), broker.lease()) as calls:
        new = await ask(calls, [user("a")])
        assert await ask(calls, [user("b")]) == recorded
        assert new.id != recorded.id
        await calls.finish(1)
    assert sorted(broker.sequences()) == [0, 1]
    assert broker.finish is not None
    assert broker.finish.discarded_turns == []


async def test_a_step_that_fits_no_entry_breaks_the_episode(renderer: Renderer, engine: ScriptedEngine) -> None:
    broker = LedgerBroker(SAMPLING)
    async with an_episode(shared_of(renderer, broker, engine), broker.lease()) as calls:
        with pytest.raises(EpisodeFailed, match="keep large results of steps in files"):
            await calls.steps.record(RecordedStep("read", "", {"x": "y" * 300_000}), 0)
    assert broker.entries == []


async def test_an_answer_that_the_engine_ended_early_is_not_asked_for_again(
    renderer: Renderer, engine: ScriptedEngine
) -> None:
    broker = LedgerBroker(SAMPLING)
    # Only the first is ended early: its second record comes after that of the other call.
    asked = (("a", None), ("b", 2))
    short = ScriptedEngine(stopping(renderer, one_in=10**9), piece_tokens=3)
    short.most_tokens = 3
    async with an_episode(shared_of(renderer, broker, short), broker.lease()) as calls:
        answers = await asyncio.gather(*(ask(calls, [user(text)], max_tokens=most) for text, most in asked))
    assert [(each.finish_reason, len(each.token_ids)) for each in answers] == [("length", 3), ("length", 2)]
    resumed, second = broker.resumed(), an_engine(engine)
    async with an_episode(shared_of(renderer, resumed, second), resumed.lease()) as calls:
        again = await asyncio.gather(*(ask(calls, [user(text)], max_tokens=most) for text, most in asked))
        assert again == answers
        await calls.finish(1)
    assert second.requests == []
