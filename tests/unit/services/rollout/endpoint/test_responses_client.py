"""OpenAI's own client, unmodified, asks for responses."""

import json
import tracemalloc
from typing import Any

import msgspec
import openai
import pytest

from gspo_services.rollout.endpoint import CallRefused, ToolCall
from gspo_services.rollout.endpoint.responses import kept
from gspo_services.rollout.endpoint.responses.kept import KeptResponses
from tests.support.scripted_episodes import CREATED, ScriptedCalls, answer, delta
from tests.unit.services.rollout.endpoint.conftest import Serve

TOOL: Any = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}, "strict": False}
CALL = ToolCall(id="c1", name="look", arguments='{"at": 1}')
ALL = answer("Hello.", reasoning="hm", tool_calls=[CALL], call_id="chatcmpl-7")


async def test_a_whole_response(serve: Serve) -> None:
    calls = ScriptedCalls(delta("Hel"), answer(call_id="chatcmpl-7"))
    async with serve(k1=calls) as endpoint, endpoint.client() as client:
        given = await client.responses.create(
            model="org/tiny", instructions="Be short.", input="hi", max_output_tokens=9, reasoning={"effort": "low"}
        )
        assert (given.id, given.created_at, given.status, given.output_text) == ("resp_7", CREATED, "completed", "Hello.")
        assert given.usage is not None
        assert (given.usage.input_tokens, given.usage.output_tokens, given.usage.total_tokens) == (7, 4, 11)
        [request] = calls.requests
        assert request.messages == [{"role": "system", "content": "Be short."}, {"role": "user", "content": "hi"}]
        assert (request.max_tokens, request.template_arguments) == (9, {"reasoning_effort": "low"})
        assert endpoint.count("calls_total", status="200") == 1


async def test_reasoning_text_and_calls_are_items_whole_and_streamed_and_come_back_as_one_message(serve: Serve) -> None:
    calls = ScriptedCalls(delta(reasoning="hm", call_id="chatcmpl-7"), delta("Hel", call_id="chatcmpl-7"), ALL)
    async with serve(k1=calls) as endpoint, endpoint.client() as client:
        given = await client.responses.create(model="org/tiny", input="hi", tools=[TOOL])
        assert [item.type for item in given.output] == ["reasoning", "message", "function_call"]
        async with client.responses.stream(model="org/tiny", input="hi", tools=[TOOL]) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        # The client's helper adds what it has parsed.
        told = json.loads(json.dumps([item.to_dict() for item in final.output], default=str))
        for item in told:
            item.pop("parsed_arguments", None)
            for part in item.get("content") or []:
                part.pop("parsed", None)
        assert told == [item.to_dict() for item in given.output]
        assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3
        assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
        output: Any = [*given.output, {"type": "function_call_output", "call_id": "c1", "output": "42"}]
        await client.responses.create(model="org/tiny", input=[{"role": "user", "content": "hi"}, *output], tools=[TOOL])
        called = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
        assert calls.requests[-1].messages == [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "Hello.", "tool_calls": [called], "reasoning_content": "hm"},
            {"role": "tool", "content": "42", "tool_call_id": "c1"},
        ]


async def test_two_texts_of_the_assistant_stay_two_messages(serve: Serve) -> None:
    calls = ScriptedCalls()
    said: Any = [{"role": role, "content": text} for role, text in (("assistant", "a"), ("assistant", "b"), ("user", "c"))]
    async with serve(k1=calls) as endpoint, endpoint.client() as client:
        await client.responses.create(model="org/tiny", input=said)
    assert calls.requests[0].messages == said


async def test_the_numbers_of_a_streams_events_and_its_texts_add_up(serve: Serve) -> None:
    steps = (*(delta(reasoning=text, call_id="chatcmpl-7") for text in "hm"), delta("Hel", call_id="chatcmpl-7"), ALL)
    async with serve(k1=ScriptedCalls(*steps)) as endpoint, endpoint.client() as client:
        stream = await client.responses.create(model="org/tiny", input="hi", stream=True)
        events = [event.model_dump() async for event in stream]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for kind, whole in (("output_text", "Hello."), ("reasoning_text", "hm")):
        assert "".join(event["delta"] for event in events if event["type"] == f"response.{kind}.delta") == whole
        assert [event["text"] for event in events if event["type"] == f"response.{kind}.done"] == [whole]
    places = [event["output_index"] for event in events if event["type"] == "response.output_item.added"]
    assert places == [0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_empty_answer_and_one_that_was_cut(serve: Serve, stream: bool) -> None:
    calls = ScriptedCalls(msgspec.structs.replace(answer("", call_id="chatcmpl-7"), finish_reason="length"))
    async with serve(k1=calls) as endpoint, endpoint.client() as client:
        if stream:
            events = [event async for event in await client.responses.create(model="org/tiny", input="hi", stream=True)]
            assert events[-1].type == "response.incomplete"
            given: Any = events[-1].response
        else:
            given = await client.responses.create(model="org/tiny", input="hi")
        assert (given.status, given.incomplete_details.reason, given.output_text) == ("incomplete", "max_output_tokens", "")
        assert [item.type for item in given.output] == ["message"]


async def test_a_response_continues_the_one_that_it_names(serve: Serve) -> None:
    calls, others = ScriptedCalls(ALL), ScriptedCalls()
    async with serve(k1=calls, k2=others) as endpoint, endpoint.client() as client:
        first = await client.responses.create(model="org/tiny", instructions="Be short.", input="hi")
        result: Any = [{"type": "function_call_output", "call_id": "c1", "output": "42"}]
        await client.responses.create(model="org/tiny", instructions="Be long.", input=result, previous_response_id=first.id)
        roles = [message["role"] for message in calls.requests[-1].messages]
        assert roles == ["system", "user", "assistant", "tool"]
        assert calls.requests[-1].messages[0]["content"] == "Be long."
        async with endpoint.client("k2") as other:
            with pytest.raises(openai.NotFoundError, match="none of this episode's"):
                await other.responses.create(model="org/tiny", input=result, previous_response_id=first.id)
        assert others.requests == []


async def test_a_response_that_is_not_stored_cannot_be_continued(serve: Serve) -> None:
    async with serve() as endpoint, endpoint.client() as client:
        first = await client.responses.create(model="org/tiny", input="hi", store=False)
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model="org/tiny", input="hi", previous_response_id=first.id)


async def test_what_would_only_steer_the_sampler_is_said(serve: Serve) -> None:
    calls = ScriptedCalls()
    calls.can_open = False
    text: Any = {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}}
    async with serve(k1=calls) as endpoint, endpoint.client() as client:
        raw = await client.responses.with_raw_response.create(
            model="org/tiny", input="hi", temperature=0, text=text, tools=[TOOL], tool_choice="required",
            parallel_tool_calls=False,
        )  # fmt: skip
        said = raw.headers["x-gspo-overridden"]
        assert said == "temperature, parallel_tool_calls, text.format, tool_choice"
        assert endpoint.count("overridden_total", parameter="tool_choice") == 1
        assert calls.requests[0].must_call is None
        calls.can_open = True
        await client.responses.create(
            model="org/tiny", input="hi", tools=[TOOL], tool_choice={"type": "function", "name": "look"}
        )
        assert calls.requests[-1].must_call == "look"


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probs_are_given_where_they_are_asked_for(serve: Serve, stream: bool) -> None:
    include: Any = ["message.output_text.logprobs"]
    async with serve() as endpoint, endpoint.client() as client:
        if stream:
            events = [
                each async for each in await client.responses.create(model="m", input="hi", include=include, stream=True)
            ]
            given: Any = events[-1]
            given = given.response
        else:
            given = await client.responses.create(model="m", input="hi", include=include)
        assert [one.logprob for one in given.output[0].content[0].logprobs] == [-0.5, -1.0, -1.5, -2.0]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "computer_call", "call_id": "c"}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "function_call", "name": "look", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "look", "arguments": "["}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "look", "arguments": ""}] * 2}, "input[1].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"input": [5]}, "input[0]"),
        (
            {"input": "hi", "messages": [{"role": "user", "content": "a"}], "tools": [{"type": "web_search"}]},
            "tools[0].type",
        ),
        ({"input": "hi", "tools": [{"type": "function", "function": {"name": "look"}}]}, "tools[0].name"),
        ({"input": "hi", "conversation": "conv_1"}, "conversation"),
        ({"input": "hi", "prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"input": "hi", "background": True}, "background"),
        ({"input": "hi", "previous_response_id": "resp_other"}, "previous_response_id"),
        ({"input": "hi", "previous_response_id": 5}, "previous_response_id"),
        ({"input": "hi", "text": "json"}, "text"),
        ({"input": "hi", "reasoning": {"effort": 3}}, "reasoning.effort"),
        ({"input": "hi", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "hi", "include": "all"}, "include"),
    ],
)
async def test_what_is_wrong_is_refused_by_name(serve: Serve, fields: dict[str, Any], param: str) -> None:
    calls = ScriptedCalls()
    async with serve(k1=calls) as endpoint, endpoint.client() as client:
        with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as caught:
            await client.post("/responses", body=fields, cast_to=object)
        assert (caught.value.param, calls.requests) == (param, [])


async def test_a_stream_that_fails_ends_with_an_error(serve: Serve) -> None:
    failing = ScriptedCalls(delta("Hel"), CallRefused(503, "lease_ended", "moved"))
    async with serve(k1=failing) as endpoint, endpoint.client() as client:
        stream = await client.responses.create(model="org/tiny", input="hi", stream=True)
        with pytest.raises(openai.APIError, match="moved") as caught:
            [event async for event in stream]
        assert caught.value.code == "lease_ended"


def test_kept_messages_are_held_once_and_the_oldest_responses_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MOST_BYTES", 14_000)
    responses = KeptResponses()
    long = [{"role": "user", "content": "x" * 700}]
    for number in range(20):
        responses.keep(f"resp_{number}", [*long, {"role": "assistant", "content": str(number)}])
    assert (len(responses._messages), responses.conversation("resp_0")[0]) == (21, long[0])
    responses.keep("resp_19", long)
    responses.keep("resp_big", [{"role": "user", "content": "y" * 15_000}])
    assert json.dumps(responses.conversation("resp_big"))
    with pytest.raises(CallRefused, match="newest 256"):
        responses.conversation("resp_19")
    monkeypatch.setattr(kept, "MOST_RESPONSES", 2)
    for number in range(3):
        responses.keep(f"resp_{number}", [{"role": "user", "content": str(number)}])
    assert [list(responses._conversations), len(responses._messages)] == [["resp_1", "resp_2"], 2]
    for number in range(1, 3):
        responses.keep(f"resp_{number}", [])
    assert (responses.num_bytes, responses._messages, responses._keys, responses._uses) == (0, {}, {}, {})


MANY = 20_000
FORMS: dict[str, list[dict[str, object]]] = {
    "the same": [{"content": "x"}] * MANY,
    "others": [{"content": str(number)} for number in range(MANY)],
    "wide": [{str(number): [{}, number] for number in range(MANY)}],
    "long": [{"content": "x" * 1_000_000}],
}


@pytest.mark.parametrize("form", FORMS)
def test_what_kept_responses_count_is_what_they_hold(form: str) -> None:
    responses = KeptResponses()
    messages = FORMS[form]
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for number in range(5):
        responses.keep(f"resp_{number}", messages)
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert 0.9 * held <= responses.num_bytes <= 4 * held
