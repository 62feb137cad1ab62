"""Whatever a body holds, the agent gets an answer or an error in OpenAI's shape, and no bug comes to light."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from gspo_services.rollout.endpoint import EndpointLimits, EndpointMetrics, EndpointServer
from gspo_services.rollout.endpoint.sampling import OVERRIDABLE
from gspo_services.rollout.endpoint.untrainable import _RULES
from tests.support.scripted_episodes import ScriptedCalls, ScriptedEpisodes, answer, delta

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 10),
    st.integers(),
    st.floats(),
    st.sampled_from(
        ["user", "assistant", "tool", "system", "text", "function", "object", "auto", "none", "required", "{}", ""]
    ),
    st.text(max_size=5),
)
NAMES = [
    "role", "content", "name", "type", "text", "tool_calls", "tool_call_id", "id", "function", "arguments", "parameters",
    "properties", "required", "strict", "reasoning_content", "include_usage",
]  # fmt: skip
ANY = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)


def nearly(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """An object with these fields. Now and then one is missing or holds anything, and so may the object itself."""
    right = st.fixed_dictionaries(fields)
    wrong = st.fixed_dictionaries({}, optional={name: strategy | ANY for name, strategy in fields.items()}) | ANY
    return st.one_of(right, right, right, wrong)


USUAL = ("endpoint_fields_ignored", "endpoint_fields_overridden")
TEXT = st.text(max_size=5)
FUNCTION = nearly(name=st.sampled_from(["look", "go", "no name"]), arguments=st.sampled_from(["{}", '{"a":1}', "[", ""]))
SCHEMA = nearly(
    type=st.just("object"), properties=st.dictionaries(TEXT, ANY, max_size=2), required=st.lists(TEXT, max_size=2)
)
MESSAGE = nearly(
    role=st.sampled_from(["system", "user", "assistant", "tool"]),
    content=TEXT | st.lists(nearly(type=st.just("text"), text=TEXT), max_size=2),
    tool_calls=st.lists(nearly(id=TEXT, type=st.just("function"), function=FUNCTION), max_size=2),
    tool_call_id=TEXT,
)
USER = {"role": "user", "content": "hi"}
TOOL = nearly(type=st.just("function"), function=nearly(name=st.sampled_from(["look", "go"]), parameters=SCHEMA))
PARAMETERS = [
    *_RULES, *OVERRIDABLE, "max_tokens", "max_completion_tokens", "stop", "stop_token_ids", "logprobs", "tool_choice",
    "parallel_tool_calls", "chat_template_kwargs", "reasoning_effort", "stream_options", "seed", "metadata", "unheard_of",
]  # fmt: skip
BODY = st.one_of(
    ANY,
    st.builds(
        lambda message, tools, stream, some: {"messages": message, "tools": tools, "stream": stream, **some},
        (st.just([]) | st.lists(MESSAGE, max_size=3)).map(lambda before: [*before, USER]),
        st.just([]) | st.lists(TOOL, max_size=2, unique_by=str),
        st.booleans(),
        st.just({}) | st.dictionaries(st.sampled_from(PARAMETERS), ANY, max_size=2),
    ),
)


ITEM = nearly(
    type=st.sampled_from(["message", "function_call", "function_call_output", "reasoning", "item_reference"]),
    role=st.sampled_from(["system", "user", "assistant"]),
    content=TEXT | st.lists(nearly(type=st.sampled_from(["input_text", "reasoning_text"]), text=TEXT), max_size=2),
    call_id=TEXT, name=TEXT, arguments=st.sampled_from(["{}", "["]), output=TEXT, summary=st.just([]),
)  # fmt: skip
RESPONSE = st.builds(
    lambda items, tools, some: {"input": [*items, USER], "tools": tools, **some},
    st.lists(ITEM, max_size=3),
    st.lists(nearly(type=st.just("function"), name=st.sampled_from(["look", "go"]), parameters=SCHEMA), max_size=2),
    st.dictionaries(
        st.sampled_from(
            ["instructions", "stream", "store", "previous_response_id", "text", "reasoning", "include", "tool_choice"]
        ),
        ANY,
        max_size=2,
    ),
)
BLOCK = nearly(
    type=st.sampled_from(["text", "tool_use", "tool_result", "thinking", "image"]), text=TEXT, id=TEXT, name=TEXT,
    input=st.dictionaries(TEXT, ANY, max_size=2), tool_use_id=TEXT, content=TEXT, thinking=TEXT,
)  # fmt: skip
MESSAGES = st.builds(
    lambda messages, tools, some: {"messages": [*messages, USER], "max_tokens": 5, "tools": tools, **some},
    st.lists(nearly(role=st.sampled_from(["user", "assistant"]), content=TEXT | st.lists(BLOCK, max_size=2)), max_size=3),
    st.lists(nearly(name=st.sampled_from(["look", "go"]), input_schema=SCHEMA), max_size=2),
    st.dictionaries(
        st.sampled_from(["system", "stream", "thinking", "tool_choice", "stop_sequences", "output_config", "max_tokens"]),
        ANY,
        max_size=2,
    ),
)


class Running:
    """One server and one client for all examples."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        episodes = ScriptedEpisodes(k1=ScriptedCalls(delta("Hel"), answer()))
        limits = EndpointLimits(max_body_bytes=64 * 1024)
        self._server = EndpointServer(episodes, EndpointMetrics(CollectorRegistry()), limits=limits)
        self._session = runner.run(self._open())

    async def _open(self) -> aiohttp.ClientSession:
        await self._server.start()
        return aiohttp.ClientSession(headers={"authorization": "Bearer k1"})

    def post(self, body: bytes, path: str = "/chat/completions") -> tuple[int, bytes]:
        async def post() -> tuple[int, bytes]:
            async with self._session.post(f"{self._server.base_url}{path}", data=body) as response:
                return response.status, await response.read()

        return self._runner.run(post())

    def close(self) -> None:
        self._runner.run(self._session.close())
        self._runner.run(self._server.stop())


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with asyncio.Runner() as runner:
        opened = Running(runner)
        yield opened
        opened.close()


def check(running: Running, body: bytes) -> int:
    with capture_logs() as logs:
        status, page = running.post(body)
    assert [line for line in logs if line["event"] not in USUAL] == []
    if status == 200:
        assert page.startswith((b'{"id":"call-1"', b'data: {"id":"call-1"'))
        return status
    assert 400 <= status < 500
    error = json.loads(page)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (isinstance(error["message"], str), isinstance(error["code"], str)) == (True, True)
    return status


def test_any_json_is_answered_or_refused_in_openais_shape(running: Running) -> None:
    statuses = []

    @settings(max_examples=300)
    @given(body=BODY)
    def run(body: Any) -> None:
        statuses.append(check(running, json.dumps(body).encode()))

    run()
    assert min(statuses.count(200), statuses.count(400)) > 20


@pytest.mark.parametrize("path", ["/responses", "/messages"])
def test_any_json_is_answered_or_refused_in_the_shape_of_its_dialect(running: Running, path: str) -> None:
    statuses = []

    @settings(max_examples=200)
    @given(body=(RESPONSE if path == "/responses" else MESSAGES) | ANY)
    def run(body: Any) -> None:
        with capture_logs() as logs:
            status, page = running.post(json.dumps(body).encode(), path)
        assert [line for line in logs if line["event"] not in USUAL] == []
        statuses.append(status)
        if status != 200:
            assert 400 <= status < 500
            said = json.loads(page)
            assert isinstance(said["error"]["message"], str)
            assert (said.get("type") == "error") == (path == "/messages")

    run()
    assert min(statuses.count(200), statuses.count(400)) > 5


@settings(max_examples=100)
@given(
    body=st.binary(max_size=30) | st.binary(max_size=10).map(lambda some: b'{"messages":[{"role":"user","content":"' + some)
)
def test_any_bytes_are_refused_in_openais_shape(running: Running, body: bytes) -> None:
    assert check(running, body) == 400


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 60_000,
        b'{"messages":' * 5000,
        json.dumps({"messages": [{"role": "user", "content": "hi"}] * 1500}).encode(),
        json.dumps({"messages": [], "tools": [{}] * 5000}).encode(),
        json.dumps({"messages": [{"role": "user", "content": [{}] * 5000}]}).encode(),
        json.dumps({"messages": [{"role": "user", "content": "x"}], **{str(index): 1 for index in range(4000)}}).encode(),
        b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":' + b"9" * 4000 + b"}",
    ],
)
def test_heaps_of_anything_are_answered_or_refused_in_openais_shape(running: Running, body: bytes) -> None:
    check(running, body)
