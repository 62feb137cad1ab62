"""A call of a tool that an agent demands: its opening is context, the rest is sampled, and nothing is rendered again."""

from collections.abc import Sequence
from typing import Any

import pytest

from gspo_services.rollout.endpoint import CallRequest
from gspo_services.rollout.rendering import Renderer
from gspo_services.rollout.rendering.template import TemplateRenderer
from tests.support.agent_episodes import (
    LedgerBroker,
    an_episode,
    ask,
    contexts_of,
    echoed,
    kinds_in,
    sampling_of,
    shared_of,
    user,
)
from tests.support.engines.scripted_engine import ScriptedEngine

LOOK: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}}},
}
SAMPLING = sampling_of(max_turn_tokens=100)
OPENINGS = {"": ('<tool_call>\n{"name": "', 'look", "arguments": {"at": 1}}\n</tool_call>'),
            "look": ('<tool_call>\n{"name": "look', '", "arguments": {"at": 1}}\n</tool_call>')}  # fmt: skip


def saying(renderer: TemplateRenderer, opening: str, rest: str) -> ScriptedEngine:
    """Goes on with ``rest`` after the last opening."""
    begins, script = renderer._encoded(opening), [*renderer._encoded(rest), min(renderer.stop_ids)]

    def next_token(context: Sequence[int]) -> int:
        tokens = list(context)
        at = max(end for end in range(len(begins), len(tokens) + 1) if tokens[end - len(begins) : end] == begins)
        return script[len(tokens) - at]

    return ScriptedEngine(next_token, piece_tokens=3)


@pytest.mark.parametrize("name", ["", "look"])
async def test_the_opening_is_context_and_the_rest_is_sampled(renderer: TemplateRenderer, name: str) -> None:
    opening, rest = OPENINGS[name]
    engine = saying(renderer, opening, rest)
    broker, answers = LedgerBroker(SAMPLING), []
    for _ in range(2):
        broker = broker.resumed()
        async with an_episode(shared_of(renderer, broker, engine), broker.lease()) as calls:
            assert calls.can_demand(CallRequest(messages=[user("a")], tools=[LOOK], must_call=name))
            first = await ask(calls, [user("a")], tools=[LOOK], must_call=name)
            result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "42"}
            second = await ask(calls, [user("a"), echoed(first), result], tools=[LOOK], must_call=name)
            answers.append((first, second))
        assert len(engine.requests) == 2
    assert answers[0] == answers[1]
    for answer in answers[0]:
        assert [(call.name, call.arguments) for call in answer.tool_calls] == [("look", '{"at": 1}')]
        assert (answer.content, answer.finish_reason) == (None, "tool_calls")
        assert renderer.text(answer.token_ids) == rest
        assert len(answer.logprobs) == len(answer.token_ids)
    [tokens] = broker.sequences().values()
    assert kinds_in(tokens) == ["observation", "action"] * 2
    sampled = [token for kind, token in tokens if kind == "action"]
    assert sampled == [*answers[0][0].token_ids, *answers[0][1].token_ids]
    assert all(engine.next_token(context) == token for context, token in contexts_of(broker).items())


async def test_wherever_a_demanded_call_is_cut_off_it_ends_the_same(renderer: TemplateRenderer) -> None:
    opening, rest = OPENINGS[""]

    async def run(broker: LedgerBroker) -> Any:
        async with an_episode(shared_of(renderer, broker, saying(renderer, opening, rest)), broker.lease()) as calls:
            return await ask(calls, [user("a")], tools=[LOOK], must_call="")

    whole = LedgerBroker(SAMPLING)
    expected = await run(whole)
    for kept in range(2, len(whole.messages)):
        resumed = LedgerBroker(SAMPLING)
        for message, arrays in zip(whole.messages[:kept], _arrays(whole)[:kept], strict=True):
            resumed.take(message, arrays)
        again = await run(resumed)
        assert (again.token_ids, again.tool_calls, again.id) == (expected.token_ids, expected.tool_calls, expected.id)
        assert resumed.sequences() == whole.sequences()


def _arrays(broker: LedgerBroker) -> list[Any]:
    """Of each message, in order."""
    chunks = iter(broker.chunks)
    return [next(chunks)[1] if type(message).__name__ == "Chunk" else {} for message in broker.messages]


async def test_a_demand_and_none_are_two_calls_and_journals_without_one_are_as_before(renderer: Renderer) -> None:
    opening, rest = OPENINGS[""]
    engine = saying(renderer, opening, rest)  # type: ignore[arg-type]
    broker = LedgerBroker(SAMPLING)
    async with an_episode(shared_of(renderer, broker, engine), broker.lease()) as calls:
        await ask(calls, [user("a " + opening)], tools=[LOOK], max_tokens=3)
        await ask(calls, [user("a " + opening)], tools=[LOOK], max_tokens=3, must_call="")
    plain, demanded = (entry["call"] for entry in broker.entries)
    assert plain["digest"] != demanded["digest"]
    assert "opening" not in plain
    assert demanded["opening"] > 0


async def test_a_stop_string_that_the_opening_has_leaves_no_demand(renderer: Renderer) -> None:
    broker = LedgerBroker(SAMPLING)
    async with an_episode(shared_of(renderer, broker, ScriptedEngine()), broker.lease()) as calls:
        asked = {"messages": [user("a")], "tools": [LOOK], "must_call": ""}
        assert not calls.can_demand(CallRequest(**asked, stop=('"name"',)))
        assert calls.can_demand(CallRequest(**asked, stop=("END",)))
        assert not calls.can_demand(CallRequest(**asked, template_arguments={"open_thinking": True}))


async def test_a_stop_string_after_the_opening_ends_the_answer_where_it_does(renderer: TemplateRenderer) -> None:
    opening, rest = OPENINGS["look"]
    engine, broker = saying(renderer, opening, rest), LedgerBroker(SAMPLING)
    async with an_episode(shared_of(renderer, broker, engine), broker.lease()) as calls:
        answer = await ask(calls, [user("a")], tools=[LOOK], must_call="look", stop=("arg",))
    assert renderer.text(answer.token_ids) == '", "arg'
    assert (answer.finish_reason, len(answer.logprobs)) == ("stop", len(answer.token_ids))


async def test_tokens_are_counted_as_a_prompt_of_their_own(renderer: Renderer) -> None:
    broker = LedgerBroker(SAMPLING)
    async with an_episode(shared_of(renderer, broker, ScriptedEngine()), broker.lease()) as calls:
        asked = CallRequest(messages=[user("a")], tools=[LOOK])
        assert await calls.count(asked) == len(renderer.prompt_ids(asked.messages, asked.tools))
    assert broker.messages == []
