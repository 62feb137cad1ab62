"""Anthropic's own client, unmodified, asks for messages."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import msgspec
import pytest

from gspo_services.rollout.endpoint import CallRefused, RunSampling, ToolCall
from tests.support.scripted_episodes import ScriptedCalls, answer, delta
from tests.unit.services.rollout.endpoint.conftest import Endpoint, Serve

USER: Any = {"role": "user", "content": "hi"}
TOOL: Any = {"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {}}}
CALL = ToolCall(id="c1", name="look", arguments='{"at": 1}')
ALL = answer("Hello.", reasoning="hm", tool_calls=[CALL], call_id="chatcmpl-7")
PIECES = (*(delta(reasoning=text, call_id="chatcmpl-7") for text in "hm"), delta("Hel", call_id="chatcmpl-7"), ALL)


@asynccontextmanager
async def claude(endpoint: Endpoint, key: str = "k1", **options: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
    address = endpoint.server.base_url.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(
        base_url=address, max_retries=0, timeout=60, **{"api_key": key, **options}
    ) as client:
        yield client


async def test_a_whole_message(serve: Serve) -> None:
    calls = ScriptedCalls(answer(call_id="chatcmpl-7"))
    async with serve(k1=calls) as endpoint, claude(endpoint) as client:
        system: Any = [
            {"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "short."},
        ]
        given = await client.messages.create(
            model="org/tiny", max_tokens=9, system=system, messages=[USER], stop_sequences=["END"], tools=[TOOL]
        )
        assert (given.id, given.role, given.stop_reason) == ("msg_7", "assistant", "end_turn")
        assert [block.to_dict() for block in given.content] == [{"type": "text", "text": "Hello."}]
        assert (given.usage.input_tokens, given.usage.output_tokens) == (7, 4)
        [request] = calls.requests
        assert request.messages == [{"role": "system", "content": "Be short."}, USER]
        assert (request.max_tokens, request.stop) == (9, ("END",))
        function = {"name": "look", "description": "Looks.", "parameters": TOOL["input_schema"]}
        assert request.tools == [{"type": "function", "function": function}]
        assert endpoint.count("calls_total", status="200") == 1


async def test_thinking_text_and_calls_are_blocks_whole_and_streamed_and_come_back_as_one_message(serve: Serve) -> None:
    calls = ScriptedCalls(*PIECES)
    async with serve(k1=calls) as endpoint, claude(endpoint) as client:
        given = await client.messages.create(model="org/tiny", max_tokens=9, messages=[USER], tools=[TOOL])
        assert [block.type for block in given.content] == ["thinking", "text", "tool_use"]
        assert given.stop_reason == "tool_use"
        async with client.messages.stream(model="org/tiny", max_tokens=9, messages=[USER], tools=[TOOL]) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            final = await stream.get_final_message()
        assert text == "Hello."
        assert [block.to_dict() for block in final.content] == [block.to_dict() for block in given.content]
        assert (final.stop_reason, final.usage.output_tokens, final.usage.input_tokens) == ("tool_use", 4, 7)
        result: Any = [
            {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "42"}], "is_error": False},
            {"type": "text", "text": "And now?"},
        ]
        own: Any = {"role": "assistant", "content": given.content}
        await client.messages.create(
            model="org/tiny", max_tokens=9, messages=[USER, own, {"role": "user", "content": result}], tools=[TOOL]
        )
        called = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at":1}'}}
        assert calls.requests[-1].messages == [
            USER,
            {"role": "assistant", "content": "Hello.", "tool_calls": [called], "reasoning_content": "hm"},
            {"role": "tool", "content": "42", "tool_call_id": "c1"},
            {"role": "user", "content": "And now?"},
        ]


async def test_texts_before_and_after_a_result_keep_their_places(serve: Serve) -> None:
    calls = ScriptedCalls()
    said: Any = [
        {"type": "text", "text": "a"}, {"type": "text", "text": "b"},
        {"type": "tool_result", "tool_use_id": "c1"}, {"type": "text", "text": "c"},
    ]  # fmt: skip
    async with serve(k1=calls) as endpoint, claude(endpoint) as client:
        await client.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": said}])
    assert [(message["role"], message["content"]) for message in calls.requests[0].messages] == [
        ("user", "ab"), ("tool", ""), ("user", "c"),
    ]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
async def test_an_empty_answer_that_was_cut(serve: Serve, stream: bool) -> None:
    cut = ScriptedCalls(msgspec.structs.replace(answer(""), finish_reason="length"))
    async with serve(k1=cut) as endpoint, claude(endpoint) as client:
        if stream:
            async with client.messages.stream(model="m", max_tokens=9, messages=[USER]) as streamed:
                given: Any = await streamed.get_final_message()
        else:
            given = await client.messages.create(model="m", max_tokens=9, messages=[USER])
        assert (given.stop_reason, given.content) == ("max_tokens", [])
        # The client gives it back as it was.
        await client.messages.create(model="m", max_tokens=9, messages=[USER, {"role": "assistant", "content": []}, USER])
        assert cut.requests[-1].messages[1] == {"role": "assistant", "content": ""}


async def test_tokens_are_counted(serve: Serve) -> None:
    async with serve() as endpoint, claude(endpoint) as client:
        counted = await client.messages.count_tokens(model="org/tiny", system="four", messages=[USER], tools=[TOOL])
        assert counted.input_tokens == 6
        assert endpoint.count("calls_total", status="200") == 0


async def test_a_key_may_be_a_token_and_a_base_url_may_end_as_openais_does(serve: Serve) -> None:
    async with serve() as endpoint:
        for options in ({"api_key": None, "auth_token": "k1"}, {"base_url": endpoint.server.base_url}):
            client = anthropic.AsyncAnthropic(
                **{"base_url": endpoint.server.base_url.removesuffix("/v1"), "api_key": "k1", "max_retries": 0, **options}
            )
            async with client:
                assert (await client.messages.create(model="m", max_tokens=9, messages=[USER])).stop_reason == "end_turn"
        async with claude(endpoint) as client:
            assert [model.id async for model in client.models.list()] == ["org/tiny"]


async def test_what_would_only_steer_the_sampler_is_said_or_refused_by_a_strict_run(serve: Serve) -> None:
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    asked: Any = {"model": "org/tiny", "max_tokens": 9, "messages": [USER], "tools": [TOOL]}
    calls = ScriptedCalls()
    async with serve(k1=calls) as endpoint, claude(endpoint) as client:
        raw = await client.messages.with_raw_response.create(**asked, temperature=0.0, top_k=5, tool_choice=choice)
        said = raw.headers["x-gspo-overridden"]
        assert said == "temperature, top_k, tool_choice.disable_parallel_tool_use"
        assert calls.requests[-1].must_call == ""
        await client.messages.create(**asked, tool_choice={"type": "tool", "name": "look"})
        assert calls.requests[-1].must_call == "look"
        await client.messages.create(**asked, tool_choice={"type": "none"}, thinking={"type": "disabled"}, metadata={})
        assert (calls.requests[-1].tools, calls.requests[-1].must_call) == ([], None)
    async with serve(sampling=RunSampling(strict=True)) as endpoint, claude(endpoint) as client:
        for more in ({"temperature": 0.0}, {"top_k": 5}, {"tool_choice": choice}):
            with pytest.raises(anthropic.BadRequestError):
                await client.messages.create(**asked, **more)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"messages": None}, "messages must be a list of messages"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [], "system": "x"}, "messages is empty"),
        ({"messages": [USER, {"role": "assistant", "content": "I"}]}, "ends with a message of the assistant"),
        ({"messages": [{"role": "tool", "content": "x"}]}, r"messages\[0\].role must be one of"),
        ({"messages": [{"role": "user", "content": []}]}, "that is not empty"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "reads text only"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a"}]}]}, "one of text, tool_result"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b"}]}, USER]},
            "input must be",
        ),
        ({"messages": [{"role": "assistant", "content": [{"type": "text"}]}, USER]}, "text must be a string"),
        ({"messages": [USER], "tools": [{"type": "bash_20250124", "name": "bash"}]}, "it runs none itself"),
        ({"messages": [USER], "tools": [TOOL, TOOL]}, "a second time"),
        ({"messages": [USER], "tool_choice": {"type": "any"}}, "no tools are offered"),
        ({"messages": [USER], "tools": [TOOL], "tool_choice": {"type": "tool", "name": "go"}}, "such as look"),
        ({"messages": [USER], "tool_choice": {"type": "x"}}, "tool_choice.type must be"),
        ({"messages": [USER], "mcp_servers": [{"url": "x"}]}, "Connect to them in the agent"),
        ({"messages": [USER], "max_tokens": 0}, "max_tokens"),
        ({"messages": [USER], "stop_sequences": ["x"] * 17}, "at most 16"),
    ],
)
async def test_what_is_wrong_is_refused_as_anthropic_does(serve: Serve, fields: dict[str, Any], text: str) -> None:
    calls = ScriptedCalls()
    async with serve(k1=calls) as endpoint, claude(endpoint) as client:
        with pytest.raises(anthropic.BadRequestError, match=text) as caught:
            await client.post("/v1/messages", body=fields, cast_to=object)
        body: Any = caught.value.body
        assert (body["type"], body["error"]["type"], calls.requests) == ("error", "invalid_request_error", [])


async def test_keys_of_no_episode_and_streams_that_fail(serve: Serve) -> None:
    failing = ScriptedCalls(delta("Hel"), CallRefused(503, "lease_ended", "moved"))
    async with serve(k1=failing) as endpoint:
        async with claude(endpoint, "other") as stranger:
            with pytest.raises(anthropic.AuthenticationError):
                await stranger.messages.create(model="m", max_tokens=9, messages=[USER])
        async with claude(endpoint) as client:
            with pytest.raises(anthropic.APIStatusError, match="moved"):
                async with client.messages.stream(model="m", max_tokens=9, messages=[USER]) as stream:
                    await stream.get_final_message()


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_7"}])
async def test_a_thread_is_refused_so_that_the_client_sends_the_whole_conversation(
    serve: Serve, thread: dict[str, str]
) -> None:
    calls = ScriptedCalls()
    async with serve(k1=calls) as endpoint, claude(endpoint) as client:
        with pytest.raises(anthropic.BadRequestError, match="keeps no conversation") as refused:
            await client.messages.create(model="m", max_tokens=9, messages=[USER], extra_body={"thread": thread})
    body: Any = refused.value.body
    # What the tool runner of version 2.14 looks for.
    assert body["error"]["details"] == {"error_code": "thread_unsupported_request"}
    assert calls.requests == []
