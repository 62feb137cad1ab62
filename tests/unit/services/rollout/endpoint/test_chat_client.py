"""OpenAI's own client, unmodified, talks to the endpoint over HTTP."""

import asyncio
from typing import Any

import openai
import pytest

from gspo_services.rollout.endpoint import CallRefused, EndpointLimits, RunSampling, ToolCall
from tests.support.scripted_episodes import CREATED, ScriptedCalls, answer, delta
from tests.unit.services.rollout.endpoint.conftest import Serve

USER: Any = {"role": "user", "content": "hi"}
TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


async def test_a_plain_answer(serve: Serve) -> None:
    calls = ScriptedCalls(delta("Hel"), answer())
    async with serve(k1=calls) as endpoint, endpoint.client() as client:
        given = await client.chat.completions.create(model="org/tiny", messages=[USER], max_tokens=9)
        assert (given.id, given.created, given.model) == ("call-1", CREATED, "org/tiny")
        assert given.choices[0].message.content == "Hello."
        assert given.usage is not None
        assert given.usage.completion_tokens == 4
        assert (calls.requests[0].messages, calls.requests[0].max_tokens) == ([USER], 9)
        assert (endpoint.count("calls_total", status="200"), endpoint.count("call_seconds_count")) == (1, 1)


async def test_a_stream(serve: Serve) -> None:
    async with serve(k1=ScriptedCalls(delta("Hel"), delta("lo"), answer())) as endpoint, endpoint.client() as client:
        stream = await client.chat.completions.create(
            model="org/tiny", messages=[USER], stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello."
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.total_tokens == 11


async def test_a_piece_reaches_the_client_before_the_answer_is_complete(serve: Serve) -> None:
    hold = asyncio.Event()
    async with serve(k1=ScriptedCalls(delta("Hel"), hold, answer())) as endpoint, endpoint.client() as client:
        stream = await client.chat.completions.create(model="org/tiny", messages=[USER], stream=True)
        async for chunk in stream:
            if chunk.choices[0].delta.content == "Hel":
                hold.set()
        assert chunk.choices[0].finish_reason == "stop"


async def test_two_tool_calls_whole_and_streamed(serve: Serve) -> None:
    tools = [ToolCall(id=f"c{index}", name="look", arguments=f'{{"at": {index}}}') for index in range(2)]
    calls = ScriptedCalls(answer(None, tool_calls=tools))
    async with serve(k1=calls) as endpoint, endpoint.client() as client:
        given = await client.chat.completions.create(model="org/tiny", messages=[USER], tools=[TOOL])
        assert [call.model_dump() for call in given.choices[0].message.tool_calls or []] == [
            {"id": f"c{index}", "type": "function", "function": {"name": "look", "arguments": f'{{"at": {index}}}'}}
            for index in range(2)
        ]
        assert given.choices[0].finish_reason == "tool_calls"
        # The helper of the client takes no other tools.
        strict = {"type": "function", "function": {**TOOL["function"], "strict": True}}
        async with client.chat.completions.stream(model="org/tiny", messages=[USER], tools=[strict]) as stream:
            final = await stream.get_final_completion()
        streamed = [call.function for call in final.choices[0].message.tool_calls or []]
        assert [(call.name, call.arguments) for call in streamed] == [("look", '{"at": 0}'), ("look", '{"at": 1}')]
        # What the client gives back is a message that the endpoint takes.
        result: Any = {"role": "tool", "tool_call_id": "c0", "content": "42"}
        own: Any = given.choices[0].message.model_dump()
        await client.chat.completions.create(model="org/tiny", messages=[USER, own, result], tools=[TOOL])
        assert calls.requests[-1].messages[1]["tool_calls"][1]["id"] == "c1"


async def test_log_probs_whole_and_streamed(serve: Serve) -> None:
    async with serve() as endpoint, endpoint.client() as client:
        given = await client.chat.completions.create(model="org/tiny", messages=[USER], logprobs=True)
        assert given.choices[0].logprobs is not None
        assert [one.logprob for one in given.choices[0].logprobs.content or []] == [-0.5, -1.0, -1.5, -2.0]
        async with client.chat.completions.stream(model="org/tiny", messages=[USER], logprobs=True) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].logprobs is not None
        assert [one.token for one in final.choices[0].logprobs.content or []] == ["Hel", "lo", ".", "<|end|>"]


async def test_models(serve: Serve) -> None:
    async with serve() as endpoint, endpoint.client() as client:
        assert [model.id async for model in client.models.list()] == ["org/tiny"]
        assert (await client.models.retrieve("org/tiny")).owned_by == "gspo"
        with pytest.raises(openai.NotFoundError, match="serves only the model"):
            await client.models.retrieve("gpt-4o")
        async with endpoint.client("other") as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.models.list()


@pytest.mark.parametrize(
    ("failure", "raised", "code"),
    [
        (CallRefused(400, "context_length_exceeded", "too long"), openai.BadRequestError, "context_length_exceeded"),
        (CallRefused(409, "replayed_otherwise", "another call has this place"), openai.ConflictError, "replayed_otherwise"),
        (CallRefused(503, "lease_ended", "goes on elsewhere"), openai.InternalServerError, "lease_ended"),
        (ZeroDivisionError("bug"), openai.InternalServerError, "internal"),
        (TimeoutError("the backend's own"), openai.InternalServerError, "internal"),
        (ConnectionResetError("the backend's own"), openai.InternalServerError, "internal"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_fails_before_its_first_piece_has_a_status(
    serve: Serve, failure: Exception, raised: type[openai.APIStatusError], code: str, stream: bool
) -> None:
    async with serve(k1=ScriptedCalls(failure)) as endpoint, endpoint.client() as client:
        with pytest.raises(raised) as caught:
            await client.chat.completions.create(model="org/tiny", messages=[USER], stream=stream)
        assert caught.value.code == code
        assert endpoint.count("refused_total", code=code) == 1
        assert endpoint.count("calls_total", status=str(caught.value.status_code)) == 1


@pytest.mark.parametrize(
    ("failure", "code", "status"),
    [(CallRefused(503, "lease_ended", "moved"), "lease_ended", "503"), (ZeroDivisionError("bug"), "internal", "500")],
)
async def test_a_stream_that_fails_ends_with_an_error(serve: Serve, failure: Exception, code: str, status: str) -> None:
    async with serve(k1=ScriptedCalls(delta("Hel"), failure)) as endpoint, endpoint.client() as client:
        stream = await client.chat.completions.create(model="org/tiny", messages=[USER], stream=True)
        assert [(await anext(stream)).choices[0].delta.content for _ in range(2)] == ["", "Hel"]
        with pytest.raises(openai.APIError) as caught:
            await anext(stream)
        assert caught.value.code == code
        assert endpoint.count("calls_total", status=status) == 1


async def test_keys_of_no_episode_and_of_an_ended_one(serve: Serve) -> None:
    async with serve() as endpoint:
        async with endpoint.client("other") as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.chat.completions.create(model="org/tiny", messages=[USER])
        endpoint.episodes.ended.add("k1")
        async with endpoint.client() as late:
            with pytest.raises(openai.APIStatusError) as caught:
                await late.chat.completions.create(model="org/tiny", messages=[USER])
        assert (caught.value.status_code, caught.value.code) == (410, "episode_ended")


async def test_a_refused_parameter_is_a_bad_request_that_names_it(serve: Serve) -> None:
    async with serve() as endpoint, endpoint.client() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="org/tiny", messages=[USER], n=8)
        assert (caught.value.param, caught.value.code, caught.value.type) == (
            "n",
            "unsupported_value",
            "invalid_request_error",
        )


async def test_an_overridden_parameter_is_said_in_a_header_and_counted(serve: Serve) -> None:
    async with serve() as endpoint, endpoint.client() as client:
        raw = await client.chat.completions.with_raw_response.create(
            model="org/tiny", messages=[USER], temperature=0.3, top_p=0.9
        )
        assert raw.headers["x-gspo-overridden"] == "temperature, top_p"
        assert endpoint.count("overridden_total", parameter="top_p") == 1
        assert endpoint.count("overridden_total", parameter="min_p") == 0
        streamed = await client.chat.completions.create(model="gpt-4o", messages=[USER], stream=True)
        assert streamed.response.headers["x-gspo-overridden"] == "model"
        await streamed.close()
        plain = await client.chat.completions.with_raw_response.create(model="org/tiny", messages=[USER])
        assert "x-gspo-overridden" not in plain.headers
    async with serve(sampling=RunSampling(strict=True)) as endpoint, endpoint.client() as client:
        with pytest.raises(openai.BadRequestError, match="the run's own value of 1 applies"):
            await client.chat.completions.create(model="org/tiny", messages=[USER], temperature=0.3)


async def test_each_episode_has_its_own_temperature(serve: Serve) -> None:
    """It changes within a run, and a group under way keeps the one that it began with."""
    cool = ScriptedCalls()
    cool.temperature = 0.3
    async with serve(k1=cool) as endpoint, endpoint.client() as client:
        same = await client.chat.completions.with_raw_response.create(model="org/tiny", messages=[USER], temperature=0.3)
        assert "x-gspo-overridden" not in same.headers
        other = await client.chat.completions.with_raw_response.create(model="org/tiny", messages=[USER], temperature=1.0)
        assert other.headers["x-gspo-overridden"] == "temperature"


async def test_a_request_keeps_its_id_and_one_without_gets_one(serve: Serve) -> None:
    async with serve() as endpoint, endpoint.client() as client:
        own = await client.chat.completions.create(model="org/tiny", messages=[USER], extra_headers={"x-request-id": "r-7"})
        assert own._request_id == "r-7"
        given = await client.chat.completions.create(model="org/tiny", messages=[USER])
        assert (given._request_id or "").startswith("req_")
        other = await client.chat.completions.create(
            model="org/tiny", messages=[USER], extra_headers={"x-request-id": "two words"}
        )
        assert (other._request_id or "").startswith("req_")


async def test_two_episodes_are_answered_at_once_by_their_keys(serve: Serve) -> None:
    hold = asyncio.Event()
    slow, quick = ScriptedCalls(hold, answer("slow")), ScriptedCalls(answer("quick"))
    async with serve(k1=slow, k2=quick) as endpoint, endpoint.client("k1") as first, endpoint.client("k2") as second:
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(first.chat.completions.create(model="org/tiny", messages=[USER]))
            await slow.started.wait()
            given = await second.chat.completions.create(model="org/tiny", messages=[USER])
            assert given.choices[0].message.content == "quick"
            hold.set()
        assert waiting.result().choices[0].message.content == "slow"


async def test_an_episode_has_its_own_places_for_calls(serve: Serve) -> None:
    hold = asyncio.Event()
    calls = ScriptedCalls(hold, answer())
    limits = EndpointLimits(max_calls=1)
    async with serve(limits=limits, k1=calls, k2=ScriptedCalls()) as endpoint, endpoint.client() as client:
        async with asyncio.TaskGroup() as group:
            group.create_task(client.chat.completions.create(model="org/tiny", messages=[USER]))
            await calls.started.wait()
            assert endpoint.count("calls_running") == 1
            with pytest.raises(openai.RateLimitError) as caught:
                await client.chat.completions.create(model="org/tiny", messages=[USER])
            assert caught.value.response.headers["retry-after"] == "1"
            async with endpoint.client("k2") as other:
                await other.chat.completions.create(model="org/tiny", messages=[USER])
            hold.set()
        await client.chat.completions.create(model="org/tiny", messages=[USER])
        assert endpoint.count("calls_running") == 0
