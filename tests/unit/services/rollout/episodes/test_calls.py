"""One run of an agent: where its calls go on, what they are refused, and that the engine saw what is trained."""

import asyncio
from collections.abc import Awaitable
from contextlib import aclosing
from typing import Any

import pytest

from gspo_protocol.limits import MAX_SEQUENCES, TrajectoryLimits
from gspo_protocol.messages import Chunk, Journal
from gspo_services.rollout.endpoint import CallAnswer, CallRefused, CallRequest
from gspo_services.rollout.episodes import EpisodeRegistry
from gspo_services.rollout.episodes.fingerprints import call_digest, message_keys
from gspo_services.rollout.metrics import CONTEXTS
from gspo_services.rollout.rendering import Renderer
from gspo_services.rollout.sglang import EngineError, EngineRefused
from gspo_services.rollout.work import EpisodeFailed
from tests.support.agent_episodes import (
    NOW,
    LedgerBroker,
    an_episode,
    ask,
    contexts_of,
    counted,
    echoed,
    kinds_in,
    sampling_of,
    shared_of,
    user,
)
from tests.support.engines.scripted_engine import ScriptedEngine, some_logprob
from tests.unit.services.rollout.episodes.conftest import stopping

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def setup(renderer: Renderer, engine: ScriptedEngine, limits: TrajectoryLimits | None = None, **changes: Any) -> Any:
    sampling = sampling_of(**{name: changes.pop(name) for name in list(changes) if name.startswith("max_")})
    broker = LedgerBroker(sampling, limits)
    extra = {} if limits is None else {"limits": limits}
    return broker, shared_of(renderer, broker, engine, **extra, **changes)


def require_contexts(broker: LedgerBroker, engine: ScriptedEngine) -> None:
    """Each sampled token is what the engine makes of exactly the tokens before it in its sequence."""
    for context, token in contexts_of(broker).items():
        assert engine.next_token(context) == token


async def test_a_conversation_is_one_sequence_of_prompt_answers_and_bridges(
    renderer: Renderer, engine: ScriptedEngine
) -> None:
    broker, shared = setup(renderer, engine)
    async with an_episode(shared, broker.lease()) as calls:
        said = [user("How is it?")]
        prompt = renderer.prompt_ids(said)
        for text in ("And now?", "More.", "Go on."):
            answer = await ask(calls, said)
            assert answer.prompt_tokens == len(calls.log.sequences[0].token_ids) - len(answer.token_ids)
            assert (answer.created, answer.id[:9]) == (NOW, "chatcmpl-")
            said += [echoed(answer), user(text)]
        await calls.finish(0.5)
    (tokens,) = broker.sequences().values()
    assert [token for _, token in tokens][: len(prompt)] == prompt
    assert kinds_in(tokens) == ["observation", "action"] * 3
    require_contexts(broker, engine)
    assert broker.finish is not None
    assert broker.finish.turn_rewards == [0.0, 0.0, 0.5]
    assert {request.sampling.temperature for request in engine.requests} == {0.7}, "the lease's"
    assert [reward for chunk, _ in broker.chunks for reward in chunk.turn_rewards] == [0.0, 0.0]


async def test_what_is_sent_begins_with_the_call_and_its_observation(renderer: Renderer, engine: ScriptedEngine) -> None:
    broker, shared = setup(renderer, engine)
    hold = engine.hold_at(len(renderer.prompt_ids([user("x")])))
    async with an_episode(shared, broker.lease()) as calls, asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(ask(calls, [user("x")], max_tokens=9))
        await hold.reached.wait()
        entry, chunk = broker.messages
        assert isinstance(entry, Journal)
        assert isinstance(chunk, Chunk)
        assert chunk.state == {}
        assert [segment.kind for segment in chunk.segments] == ["observation"]
        assert {"ordinal": 0, "sequence": 0, "max_tokens": 9}.items() <= entry.entry["call"].items()
        hold.go.set()
        await asking


async def test_logprobs_and_versions_are_the_engines(renderer: Renderer, engine: ScriptedEngine) -> None:
    broker, shared = setup(renderer, engine)
    async with an_episode(shared, broker.lease()) as calls:
        answer = await ask(calls, [user("Say something long.")])
        await calls.finish(1)
    (tokens,) = broker.sequences().values()
    ids = [token for _, token in tokens]
    begin = answer.prompt_tokens
    assert answer.token_ids == ids[begin:]
    assert answer.logprobs == [some_logprob(ids[:place]) for place in range(begin, len(ids))]
    assert answer.tokens == [renderer.text([token]) for token in answer.token_ids]
    assert {run.version for chunk, _ in broker.chunks for run in chunk.version_runs} == {-1, 1}


@pytest.mark.parametrize(
    "changed",
    [
        {"messages": [user("Another beginning."), None, user("b")]},
        {"messages": [user("a"), {"role": "assistant", "content": "what the model never said"}, user("b")]},
        {"messages": [user("a"), None, user("b")], "tools": [WEATHER]},
        {"messages": [user("a"), None, user("b")], "template_arguments": {"enable_thinking": False}},
        {"messages": [user("a")]},
        {"messages": [user("a"), None, {"role": "assistant", "content": "put into its mouth"}, user("b")]},
    ],
    ids=["compacted", "edited", "tools", "arguments", "again", "not bridged"],
)
async def test_what_does_not_extend_the_conversation_begins_a_sequence(
    renderer: Renderer, engine: ScriptedEngine, changed: dict[str, Any]
) -> None:
    broker, shared = setup(renderer, engine)
    async with an_episode(shared, broker.lease()) as calls:
        first = await ask(calls, [user("a")])
        messages = [echoed(first) if each is None else each for each in changed["messages"]]
        await ask(calls, **{**changed, "messages": messages})
        # The first conversation is where it was, and goes on.
        await ask(calls, [user("a"), echoed(first), user("c")])
        await calls.finish(1)
    found = broker.sequences()
    assert [kinds_in(tokens) for tokens in found.values()] == [["observation", "action"] * 2, ["observation", "action"]]
    prompt = renderer.prompt_ids(messages, changed.get("tools", ()), changed.get("template_arguments", {}))
    assert [token for _, token in found[1]][: len(prompt)] == prompt
    require_contexts(broker, engine)


async def test_after_its_answer_the_policy_may_speak_again_under_all_of_it(
    renderer: Renderer, engine: ScriptedEngine
) -> None:
    """As an agent of langgraph asks for the object of what it has said."""
    broker, shared = setup(renderer, engine)
    async with an_episode(shared, broker.lease()) as calls:
        said = [user("How is it?")]
        said.append(echoed(await ask(calls, said)))
        await ask(calls, said)
        await calls.finish(1.0)
    _, again = broker.sequences().values()
    prompt = renderer.prompt_ids(said)
    assert ([token for _, token in again][: len(prompt)], kinds_in(again)) == (prompt, ["observation", "action"])
    require_contexts(broker, engine)


async def test_new_contexts_and_unread_tool_calls_are_counted(renderer: Renderer, engine: ScriptedEngine) -> None:
    broker, shared = setup(renderer, engine, max_turn_tokens=200)

    def contexts() -> dict[str, float]:
        return {reason: shared.metrics.contexts.labels(reason=reason)._value.get() for reason in CONTEXTS}

    async with an_episode(shared, broker.lease()) as calls:
        first = await ask(calls, [user("a")])
        assert contexts() == {"first": 1, "other": 0, "no_bridge": 0}
        second = await ask(calls, [user("a"), echoed(first), user("b")])
        assert contexts() == {"first": 1, "other": 0, "no_bridge": 0}
        await ask(calls, [user("elsewhere")])
        assert contexts() == {"first": 1, "other": 1, "no_bridge": 0}
        # Nobody but the model may say what an assistant said.
        said = [user("a"), echoed(first), user("b"), echoed(second), {"role": "assistant", "content": "so"}, user("c")]
        await ask(calls, said)
        assert contexts() == {"first": 1, "other": 1, "no_bridge": 1}
        assert counted(shared.metrics.unparsed_calls) == 0
        says(engine, renderer, "<tool_call>{no json}</tool_call>", [user("call")])
        answer = await ask(calls, [user("call")], tools=[WEATHER])
        assert (answer.tool_calls, answer.content) == ([], "<tool_call>{no json}</tool_call>")
        assert counted(shared.metrics.unparsed_calls) == 1


async def test_two_calls_from_one_conversation_are_two_sequences_that_alternate(
    renderer: Renderer, engine: ScriptedEngine
) -> None:
    engine.next_token = stopping(renderer, one_in=1000)
    broker, shared = setup(renderer, engine, max_turn_tokens=12)
    async with an_episode(shared, broker.lease()) as calls:
        first = await ask(calls, [user("a")])
        said = [user("a"), echoed(first), user("b")]
        async with asyncio.TaskGroup() as tasks:
            answers = [tasks.create_task(ask(calls, said)) for _ in range(3)]
        # All have one path; each goes on by itself.
        assert len({task.result().id for task in answers}) == 3
        await calls.finish(1)
    found = broker.sequences()
    assert [kinds_in(tokens).count("action") for tokens in found.values()] == [2, 1, 1]
    order = [segment.sequence for chunk, _ in broker.chunks for segment in chunk.segments if segment.kind == "action"]
    assert order != sorted(order), "they did not alternate"
    assert engine.requests[2].sampling.seed != engine.requests[3].sampling.seed
    require_contexts(broker, engine)


async def test_few_changes_allowed_are_not_used_up_by_parallel_answers(renderer: Renderer, engine: ScriptedEngine) -> None:
    engine.next_token = stopping(renderer, one_in=1000)
    limits = TrajectoryLimits(turns=4, segments=8, runs=16)
    broker, shared = setup(renderer, engine, limits, max_turn_tokens=100, chunk_tokens=2)
    async with an_episode(shared, broker.lease()) as calls:
        said = await asyncio.gather(*(ask(calls, [user(text)]) for text in "abcd"), return_exceptions=True)
        refused = [each for each in said if isinstance(each, BaseException)]
        assert all(isinstance(each, CallRefused) and each.code == "too_many_calls" for each in refused)
        assert len(refused) < 3
        await calls.finish(1)
    assert broker.row.num_segments <= 8


async def test_calls_are_limited(renderer: Renderer, engine: ScriptedEngine) -> None:
    broker, shared = setup(renderer, engine, TrajectoryLimits(turns=3, segments=6, runs=12))
    async with an_episode(shared, broker.lease()) as calls:
        for text in "abc":
            await ask(calls, [user(text)])
        with pytest.raises(CallRefused, match="4 calls, 3 are allowed") as refused:
            await ask(calls, [user("d")])
        assert (refused.value.status, refused.value.code) == (400, "too_many_calls")
        await calls.finish(1)
    assert broker.row.num_turns == 3


async def test_a_stop_string_ends_the_request_and_is_the_last_of_the_turn(
    renderer: Renderer, engine: ScriptedEngine
) -> None:
    engine.next_token = stopping(renderer, one_in=1000)
    broker, shared = setup(renderer, engine, max_turn_tokens=30)
    async with an_episode(shared, broker.lease()) as calls:
        whole = await ask(calls, [user("a")])
        text = renderer.text(whole.token_ids)
        place = next(at for at in range(4, len(text)) if text[at : at + 2] not in text[:at] and text[at] not in " \n")
        stop = text[place : place + 2]
        cut = await ask(calls, [user("a")], stop=(stop,))
        assert cut.finish_reason == "stop"
        assert cut.content == text[:place].strip()
        assert stop in renderer.text(cut.token_ids)
        assert stop not in renderer.text(cut.token_ids[:-1])
        await ask(calls, [user("a"), echoed(cut), user("b")])
        await calls.finish(1)
    assert engine.num_closed == 3
    assert kinds_in(broker.sequences()[1]) == ["observation", "action"] * 2
    require_contexts(broker, engine)


async def test_a_stop_token_of_the_call_ends_it(renderer: Renderer, engine: ScriptedEngine) -> None:
    engine.next_token = stopping(renderer, one_in=1000)
    broker, shared = setup(renderer, engine)
    async with an_episode(shared, broker.lease()) as calls:
        whole = await ask(calls, [user("a")])
        assert whole.finish_reason == "length"
        ended = await ask(calls, [user("a")], stop_token_ids=(whole.token_ids[3],))
        assert (ended.finish_reason, ended.token_ids) == (
            "stop",
            whole.token_ids[: whole.token_ids.index(whole.token_ids[3]) + 1],
        )


async def test_lengths_are_those_of_the_call_the_turn_the_sequence_and_the_episode(
    renderer: Renderer, engine: ScriptedEngine
) -> None:
    engine.next_token = stopping(renderer, one_in=10**9)
    prompt = len(renderer.prompt_ids([user("a")]))
    sampling = {"max_turn_tokens": 12, "max_tokens": prompt + 20, "max_episode_tokens": 3 * prompt + 20}
    broker, shared = setup(renderer, engine, **sampling)
    async with an_episode(shared, broker.lease()) as calls:
        answer = await ask(calls, [user("a")], max_tokens=5)
        assert (len(answer.token_ids), answer.finish_reason) == (5, "length")
        with pytest.raises(CallRefused, match=rf"maximum context length is {prompt + 20} tokens") as refused:
            await ask(calls, [user("a"), echoed(answer), user("much more " * 20)])
        assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")
        async with asyncio.TaskGroup() as tasks:
            both = [tasks.create_task(ask(calls, [user("a")])) for _ in range(2)]
        # 15 are left when the first begins, which is promised 12.
        assert [len(task.result().token_ids) for task in both] == [12, 3]
        with pytest.raises(CallRefused, match=rf"{3 * prompt + 20} tokens in total .* are used"):
            await ask(calls, [user("a")])
        await calls.finish(1)
    assert broker.row.num_tokens == 3 * prompt + 20


async def test_contexts_are_limited(renderer: Renderer, engine: ScriptedEngine) -> None:
    engine.next_token = lambda _: min(renderer.stop_ids)
    broker, shared = setup(renderer, engine, max_episode_tokens=100_000)
    async with an_episode(shared, broker.lease()) as calls:
        for number in range(MAX_SEQUENCES):
            answer = await ask(calls, [user(str(number))])
        with pytest.raises(CallRefused, match="256 contexts") as refused:
            await ask(calls, [user("one more")])
        assert refused.value.status == 400
        await ask(calls, [user("255"), echoed(answer), user("b")])


async def test_an_ended_episode_and_an_unknown_key_are_refused(renderer: Renderer, engine: ScriptedEngine) -> None:
    broker, shared = setup(renderer, engine)
    registry = EpisodeRegistry("model")
    async with an_episode(shared, broker.lease()) as calls:
        key = registry.add(calls)
        assert registry.calls_of(key) is calls
        assert registry.add(calls) != key
        await ask(registry.calls_of(key), [user("a")])  # type: ignore[arg-type]
        await calls.finish(1)
        num_sent = len(broker.messages)
        with pytest.raises(CallRefused) as refused:
            await ask(calls, [user("a")])
        assert (refused.value.status, refused.value.code) == (410, "episode_ended")
        assert len(broker.messages) == num_sent
        registry.remove(key)
        registry.remove(key)
    for unknown, status in ((key, 410), ("", 401), ("made up", 401)):
        with pytest.raises(CallRefused) as refused:
            registry.calls_of(unknown)
        assert refused.value.status == status


async def test_what_the_template_refuses_leaves_no_trace(renderer: Renderer, engine: ScriptedEngine) -> None:
    broker, shared = setup(renderer, engine)
    async with an_episode(shared, broker.lease()) as calls:
        for fields in ({"template_arguments": {"tools": []}}, {"stop": ("",)}):
            with pytest.raises(CallRefused) as refused:
                await ask(calls, [user("a")], **fields)
            assert (refused.value.status, refused.value.code) == (400, "not_rendered")
        with pytest.raises(CallRefused, match="maximum context length"):
            await ask(calls, [user("huge " * 100_000)])
        assert broker.messages == []
        with pytest.raises(EpisodeFailed, match="no call"):
            await calls.finish(1)


async def test_a_refusal_of_the_engine_is_the_agents_and_a_failure_is_the_episodes(
    renderer: Renderer, engine: ScriptedEngine
) -> None:
    broker, shared = setup(renderer, engine)
    prompt = len(renderer.prompt_ids([user("a")]))
    async with an_episode(shared, broker.lease()) as calls:
        engine.failures[prompt] = EngineRefused("too long")
        with pytest.raises(CallRefused, match="too long") as refused:
            await calls.while_whole(ask(calls, [user("a")]))
        assert refused.value.status == 400
        await ask(calls, [user("a")])
        engine.failures[prompt] = EngineError("the engine is gone")

        async def patient_agent() -> None:
            try:
                await ask(calls, [user("a")])
            except CallRefused:
                await asyncio.Event().wait()

        with pytest.raises(EngineError, match="is gone"):
            await calls.while_whole(patient_agent())
        with pytest.raises(CallRefused) as refused:
            await ask(calls, [user("b")])
        assert refused.value.status == 503
        with pytest.raises(EngineError, match="is gone"):
            await calls.finish(1)
    assert broker.finish is None


async def test_a_call_may_fail_while_another_ends_the_episode(renderer: Renderer, engine: ScriptedEngine) -> None:
    broker, shared = setup(renderer, engine)
    places = [len(renderer.prompt_ids([user(text)])) for text in ("a", "bb")]
    first, second = (engine.hold_at(place) for place in places)
    async with an_episode(shared, broker.lease()) as calls, asyncio.TaskGroup() as tasks:
        asking = [tasks.create_task(refused(ask(calls, [user(text)]))) for text in ("a", "bb")]

        async def agent() -> None:
            await first.reached.wait()
            await second.reached.wait()
            engine.failures |= {place: EngineError("the engine is gone") for place in places}
            first.go.set()
            try:
                await asyncio.Event().wait()
            finally:
                second.go.set()
                await asyncio.wait(asking)

        with pytest.raises(EngineError, match="is gone"):
            await calls.while_whole(agent())
        assert [task.result() for task in asking] == [503, 503]


async def refused(asking: Awaitable[Any]) -> int:
    """The status with which a call is refused."""
    with pytest.raises(CallRefused) as error:
        await asking
    return error.value.status


async def test_a_call_may_fail_after_its_agent_has_returned(renderer: Renderer, engine: ScriptedEngine) -> None:
    broker, shared = setup(renderer, engine)
    place = len(renderer.prompt_ids([user("a")]))
    hold = engine.hold_at(place)
    async with an_episode(shared, broker.lease()) as calls:
        asking = asyncio.get_running_loop().create_task(ask(calls, [user("a")]))
        await calls.while_whole(hold.reached.wait())
        engine.failures[place] = EngineError("the engine is gone")
        hold.go.set()
        with pytest.raises(CallRefused, match="has failed"):
            await asking
        with pytest.raises(EngineError, match="is gone"):
            await calls.finish(1)


async def test_an_aborted_generation_keeps_what_it_made(renderer: Renderer, engine: ScriptedEngine) -> None:
    engine.next_token = stopping(renderer, one_in=10**9)
    broker, shared = setup(renderer, engine, chunk_tokens=100)
    prompt = len(renderer.prompt_ids([user("a")]))
    engine.failures[prompt + 5] = "abort"
    async with an_episode(shared, broker.lease()) as calls:
        with pytest.raises(EngineError, match="abort"):
            await calls.while_whole(ask(calls, [user("a")]))
        assert broker.row.num_tokens == prompt
        await calls.hand_back()
    assert broker.row.num_tokens == prompt + 5


async def test_a_call_goes_on_when_its_client_is_gone_and_the_same_request_finds_it(
    renderer: Renderer, engine: ScriptedEngine
) -> None:
    broker, shared = setup(renderer, engine)
    hold = engine.hold_at(len(renderer.prompt_ids([user("a")])))
    async with an_episode(shared, broker.lease()) as calls:
        asking = asyncio.get_running_loop().create_task(ask(calls, [user("a")]))
        await hold.reached.wait()
        asking.cancel()
        await asyncio.wait([asking])
        hold.go.set()
        answer = await ask(calls, [user("a")])
        assert len(engine.requests) == 1
        again = await ask(calls, [user("a")])
        assert again.id != answer.id
        assert len(engine.requests) == 2


async def test_an_answer_that_is_lost_on_its_way_is_given_again(renderer: Renderer, engine: ScriptedEngine) -> None:
    broker, shared = setup(renderer, engine)
    async with an_episode(shared, broker.lease()) as calls:
        async with aclosing(calls.call(CallRequest(messages=[user("a")]))) as pieces:
            lost = await anext(piece async for piece in pieces if isinstance(piece, CallAnswer))
            assert await ask(calls, [user("a")]) != lost, "it may still arrive, so this is another call"
        assert await ask(calls, [user("a")]) == lost
        assert len(engine.requests) == 2
        assert await ask(calls, [user("a")]) != lost


async def test_generation_waits_while_weights_are_replaced(renderer: Renderer, engine: ScriptedEngine) -> None:
    broker, shared = setup(renderer, engine)
    shared.may_generate.clear()
    async with an_episode(shared, broker.lease()) as calls, asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(ask(calls, [user("a")]))
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(broker.messages) == 2
        assert engine.requests == []
        shared.may_generate.set()
        await asking


def says(engine: ScriptedEngine, renderer: Renderer, text: str, messages: list[dict[str, Any]]) -> None:
    """Have the engine answer ``messages`` with ``text``, and everything else with nothing."""
    scripted = [*renderer._tokenizer.encode(text), min(renderer.stop_ids)]  # type: ignore[attr-defined]
    begin = len(renderer.prompt_ids(messages, [WEATHER]))
    engine.next_token = lambda context: (
        scripted[len(context) - begin] if 0 <= len(context) - begin < len(scripted) else min(renderer.stop_ids)
    )


async def test_tool_calls_are_answered_and_their_results_bridged(renderer: Renderer, engine: ScriptedEngine) -> None:
    text = 'I look.<tool_call>\n{"name": "weather", "arguments": {"b": 1, "a": "x"}}\n</tool_call>'
    says(engine, renderer, text, [user("a")])
    broker, shared = setup(renderer, engine, max_turn_tokens=200)
    async with an_episode(shared, broker.lease()) as calls:
        answer = await ask(calls, [user("a")], tools=[WEATHER])
        assert (answer.finish_reason, answer.content, answer.tool_calls[0].name) == ("tool_calls", "I look.", "weather")
        echo = echoed(answer)
        # A client has read the arguments and written them in its own way.
        echo["tool_calls"][0]["function"]["arguments"] = '{"a":"x","b":1}'
        result = {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "sunny"}
        await ask(calls, [user("a"), echo, result], tools=[WEATHER])
        await calls.finish(1)
    (tokens,) = broker.sequences().values()
    assert kinds_in(tokens) == ["observation", "action"] * 2
    require_contexts(broker, engine)


async def test_hostile_requests_are_no_conversation_of_ours() -> None:
    deep = "[" * 100_000
    request = CallRequest(
        messages=[
            {
                "role": "assistant",
                "content": "\ud800",
                "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": deep}}],
            }
        ]
    )
    assert call_digest(request, message_keys(request.messages))
