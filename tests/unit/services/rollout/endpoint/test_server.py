"""The server under agents that hang up, send too much, do not read or do not speak HTTP, and its end."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import openai
import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from gspo_services.rollout.endpoint import EndpointLimits, EndpointMetrics, EndpointServer
from gspo_services.shared.runtime.errors import EndpointError
from tests.support.scripted_episodes import ScriptedCalls, ScriptedEpisodes, answer, delta
from tests.unit.services.rollout.endpoint.conftest import PATIENCE_S, Endpoint, Serve

USER: Any = {"role": "user", "content": "hi"}
BODY = json.dumps({"messages": [USER]}).encode()
STREAM = json.dumps({"messages": [USER], "stream": True}).encode()


class Wire:
    """A connection that a test writes by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(
        self,
        body: bytes = BODY,
        *,
        method: str = "POST",
        path: str = "/v1/chat/completions",
        key: str = "k1",
        **headers: str,
    ) -> None:
        lines = {"host": "x", "authorization": f"Bearer {key}", "content_length": str(len(body)), **headers}
        head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in lines.items())
        self.writer.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body)

    async def answer(self) -> tuple[int, dict[str, str], Any]:
        """Status, headers and JSON of the next response."""
        status, headers = await self.head()
        body = await self.reader.readexactly(int(headers["content-length"]))
        return status, headers, json.loads(body)

    async def head(self) -> tuple[int, dict[str, str]]:
        async with asyncio.timeout(PATIENCE_S):
            first, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        return int(first.split()[1]), {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}

    async def num_left(self) -> int:
        """Bytes that still come before the server has ended the connection."""
        number = 0
        async with asyncio.timeout(PATIENCE_S):
            with suppress(ConnectionError):
                while some := await self.reader.read(65_536):
                    number += len(some)
        return number


@asynccontextmanager
async def wire(endpoint: Endpoint, **options: Any) -> AsyncIterator[Wire]:
    reader, writer = await asyncio.open_connection(*endpoint.address, **options)
    try:
        yield Wire(reader, writer)
    finally:
        writer.transport.abort()


async def wait_for(event: asyncio.Event) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await event.wait()


@pytest.mark.parametrize("steps", [(), (delta("Hel"),)])
@pytest.mark.parametrize("body", [BODY, STREAM])
async def test_an_agent_that_hangs_up_ends_its_call(serve: Serve, body: bytes, steps: tuple[Any, ...]) -> None:
    calls = ScriptedCalls(*steps, asyncio.Event(), answer())
    async with serve(k1=calls) as endpoint:
        async with wire(endpoint) as agent:
            agent.send(body)
            await wait_for(calls.started)
        await wait_for(calls.ended)
        await endpoint.until_quiet()
        assert (endpoint.count("calls_total", status="499"), endpoint.count("calls_running")) == (1, 0)


async def test_an_agent_that_hangs_up_in_its_body_leaves_nothing(serve: Serve) -> None:
    async with serve() as endpoint:
        async with wire(endpoint) as agent:
            agent.send(BODY, expect="100-continue", content_length=str(len(BODY) + 1))
            assert (await agent.head())[0] == 100
        await endpoint.until_quiet()
        assert (endpoint.count("calls_total", status="499"), endpoint.count("calls_running")) == (1, 0)


async def test_a_connection_serves_call_after_call(serve: Serve) -> None:
    calls = ScriptedCalls()
    async with serve(k1=calls) as endpoint, wire(endpoint) as agent:
        for _ in range(2):
            agent.send(expect="100-continue")
            assert (await agent.head())[0] == 100
            status, headers, page = await agent.answer()
            assert (status, headers["content-type"]) == (200, "application/json")
            assert page["choices"][0]["message"]["content"] == "Hello."
        agent.send(b"{")
        assert (await agent.answer())[0] == 400
        agent.send()
        assert (await agent.answer())[0] == 200
        agent.send(STREAM)
        assert (await agent.head())[0] == 200
        await endpoint.until_quiet()
        assert calls.num_taken == 4


async def test_a_body_beyond_the_limit_is_refused_before_and_while_it_is_read(serve: Serve) -> None:
    async with serve(limits=EndpointLimits(max_body_bytes=100)) as endpoint:
        async with wire(endpoint) as agent:
            agent.send(b"", content_length="101")
            status, _, page = await agent.answer()
            assert (status, page["error"]["code"]) == (413, "too_large")
        async with wire(endpoint) as agent:
            agent.writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer k1\r\n")
            agent.writer.write(b"transfer-encoding: chunked\r\n\r\n65\r\n" + b" " * 101 + b"\r\n0\r\n\r\n")
            assert (await agent.answer())[0] == 413
        async with wire(endpoint) as agent:
            agent.send(BODY.ljust(100))
            assert (await agent.answer())[0] == 200


async def test_nobody_without_a_key_makes_the_server_read_a_body(serve: Serve) -> None:
    async with serve() as endpoint:
        for headers in ({"authorization": "Basic k1"}, {"authorization": "Bearer "}, {"authorization": "Bearer other"}):
            async with wire(endpoint) as agent:
                agent.send(b"", content_length="1000", **headers)
                status, _, page = await agent.answer()
                assert (status, page["error"]["code"]) == (401, "invalid_api_key")


async def test_a_body_that_does_not_come_is_given_up(serve: Serve) -> None:
    async with serve(limits=EndpointLimits(silent_s=0.05)) as endpoint, wire(endpoint) as agent:
        agent.send(b"{", content_length="1000")
        status, _, page = await agent.answer()
        assert (status, page["error"]["code"]) == (408, "slow_body")


async def test_a_compressed_body_is_refused(serve: Serve) -> None:
    async with serve() as endpoint, wire(endpoint) as agent:
        agent.send(content_encoding="gzip")
        assert (await agent.answer())[0] == 415


@pytest.mark.parametrize("body", [BODY, STREAM])
async def test_an_agent_that_does_not_read_loses_its_connection(serve: Serve, body: bytes) -> None:
    text = "x" * (16 * 1024 * 1024)
    calls = ScriptedCalls(delta(text), answer(text))
    async with serve(limits=EndpointLimits(silent_s=0.05), k1=calls) as endpoint, wire(endpoint, limit=1024) as agent:
        agent.send(body)
        transport: Any = agent.writer.transport
        transport.pause_reading()
        await wait_for(calls.ended)
        await endpoint.until_quiet()
        transport.resume_reading()
        # What waited in the server was dropped with the connection.
        assert await agent.num_left() < len(text)
        assert calls.num_taken == 0
        assert (endpoint.count("calls_total", status="499"), endpoint.count("calls_running")) == (1, 0)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("POST", "/v1/completions", 404, "unknown_path"),
        ("GET", "/", 404, "unknown_path"),
        ("GET", "/v1/chat/completions", 405, "wrong_method"),
        ("DELETE", "/v1/models/org/tiny", 405, "wrong_method"),
        ("GET", "/v1/models/%ff%00", 404, "model_not_found"),
        ("GET", "/v1/chat/completions/", 404, "unknown_path"),
    ],
)
async def test_other_paths_and_methods_have_openais_error_shape(
    serve: Serve, method: str, path: str, status: int, code: str
) -> None:
    async with serve() as endpoint, wire(endpoint) as agent:
        agent.send(b"", method=method, path=path)
        found, headers, page = await agent.answer()
        assert (found, page["error"]["code"]) == (status, code)
        assert ("allow" in headers) == (status == 405)


async def test_what_is_not_http_is_answered_and_cut_off_and_fills_no_log(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve() as endpoint:
        for garbage in (b"\x16\x03\x01\x02\x00\r\n\r\n", b"POST / HTTP/1.1\r\ncontent-length: x\r\n\r\n"):
            async with wire(endpoint) as agent:
                agent.writer.write(garbage)
                status, headers = await agent.head()
                assert status == 400
                assert await agent.num_left() == int(headers["content-length"])
        assert caplog.records == []
        async with wire(endpoint) as agent:
            agent.send()
            assert (await agent.answer())[0] == 200


async def test_a_connection_that_waits_for_nothing_makes_room_for_a_new_one(serve: Serve) -> None:
    async with serve(limits=EndpointLimits(max_connections=1)) as endpoint, wire(endpoint) as first:
        first.send()
        assert (await first.answer())[0] == 200
        with capture_logs() as logs:
            async with wire(endpoint) as second:
                assert await first.num_left() == 0
                second.send()
                assert (await second.answer())[0] == 200
        assert [line["event"] for line in logs] == ["http_connection_closed"]


async def test_a_body_that_comes_byte_by_byte_has_one_deadline(serve: Serve) -> None:
    async with serve(limits=EndpointLimits(silent_s=0.2)) as endpoint, wire(endpoint) as agent:
        agent.send(b"", content_length="1000")
        loop = asyncio.get_running_loop()
        drips = [loop.call_later(0.05 * number, agent.writer.write, b" ") for number in range(1000)]
        assert (await agent.answer())[2]["error"]["code"] == "slow_body"
        for drip in drips:
            drip.cancel()


async def test_a_failure_of_the_calls_is_logged_with_its_traceback_and_the_requests_id(serve: Serve) -> None:
    async with serve(k1=ScriptedCalls(ZeroDivisionError("bug"))) as endpoint, wire(endpoint) as agent:
        with capture_logs() as logs:
            agent.send(x_request_id="r-7")
            status, headers, page = await agent.answer()
        assert (status, page["error"]["code"], headers["x-request-id"]) == (500, "internal", "r-7")
        assert "bug" not in page["error"]["message"]
        [line] = logs
        assert (line["event"], line["request_id"], line["exc_info"]) == ("endpoint_call_failed", "r-7", True)


async def test_calls_that_end_without_an_answer_are_a_failure(serve: Serve) -> None:
    async with serve(k1=ScriptedCalls(delta("Hel"))) as endpoint, wire(endpoint) as agent:
        agent.send()
        assert (await agent.answer())[0] == 500


async def test_unknown_fields_are_counted_and_each_is_logged_once(serve: Serve) -> None:
    async with serve() as endpoint, wire(endpoint) as agent:
        with capture_logs() as logs:
            for fields in ({"a": 1}, {"a": 1, "b\n": 2}, {f"c{index}": 1 for index in range(200)}, {"d": 1}):
                agent.send(json.dumps({"messages": [USER], **fields}).encode())
                assert (await agent.answer())[0] == 200
        named = [line["fields"] for line in logs if line["event"] == "endpoint_fields_ignored"]
        assert named[:2] == [["a"], ["b\\n"]]
        assert [len(names) for names in named] == [1, 1, 98]
        assert endpoint.count("unknown_fields_total") == 204


async def test_a_server_that_stops_answers_what_is_under_way_and_ends_streams(serve: Serve) -> None:
    whole, streamed = ScriptedCalls(asyncio.Event(), answer()), ScriptedCalls(delta("Hel"), asyncio.Event(), answer())
    async with serve(k1=whole, k2=streamed) as endpoint, wire(endpoint) as agent, endpoint.client("k2") as client:
        agent.send()
        stream = await client.chat.completions.create(model="m", messages=[USER], stream=True)
        await wait_for(whole.started)
        await wait_for(streamed.started)
        async with asyncio.timeout(PATIENCE_S):
            await endpoint.server.stop(PATIENCE_S)
        status, headers, page = await agent.answer()
        assert (status, page["error"]["code"], headers["retry-after"]) == (503, "draining", "1")
        assert await agent.num_left() == 0
        assert [(await anext(stream)).choices[0].delta.content for _ in range(2)] == ["", "Hel"]
        with pytest.raises(openai.APIError) as caught:
            await anext(stream)
        assert caught.value.code == "draining"
        assert (whole.ended.is_set(), streamed.ended.is_set()) == (True, True)
        assert endpoint.count("calls_total", status="503") == 2
        with pytest.raises(ConnectionError):
            await asyncio.open_connection(*endpoint.address)


async def test_a_call_that_does_not_let_go_is_cut_off_within_the_budget(serve: Serve) -> None:
    class Stubborn(ScriptedCalls):
        async def call(self, request: Any) -> AsyncIterator[Any]:  # type: ignore[override]
            try:
                self.started.set()
                await asyncio.Event().wait()
                yield answer()
            finally:
                await asyncio.Event().wait()

    calls = Stubborn()
    async with serve(k1=calls) as endpoint, wire(endpoint) as agent:
        agent.send()
        await wait_for(calls.started)
        with capture_logs() as logs:
            async with asyncio.timeout(PATIENCE_S):
                await endpoint.server.stop(0.01)
        assert logs[0]["event"] == "endpoint_drain_incomplete"
        assert await agent.num_left() == 0
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


async def test_a_call_that_comes_on_an_open_connection_while_the_server_stops_is_refused(serve: Serve) -> None:
    calls = ScriptedCalls(asyncio.Event(), answer())
    async with serve(k1=calls) as endpoint, wire(endpoint) as agent:
        agent.send(method="GET", path="/v1/models", body=b"")
        await agent.answer()
        # As after the first step of ``stop``, which closes an idle connection only at its end.
        endpoint.server._draining = True
        agent.send()
        status, headers, page = await agent.answer()
        assert (status, page["error"]["code"], headers["connection"]) == (503, "draining", "close")


async def test_a_port_that_is_taken_is_an_error_for_people(serve: Serve) -> None:
    async with serve() as endpoint:
        host, port = endpoint.address
        second = EndpointServer(ScriptedEpisodes(), EndpointMetrics(CollectorRegistry()), host=host, port=port)
        with pytest.raises(EndpointError, match=f"endpoint 127.0.0.1:{port}: .*Choose another port"):
            await second.start()
        await second.stop()


async def test_the_url_is_of_the_address_that_is_bound_whatever_the_name() -> None:
    server = EndpointServer(ScriptedEpisodes(k1=ScriptedCalls()), EndpointMetrics(CollectorRegistry()), host="localhost")
    await server.start()
    try:
        assert server.base_url.startswith(("http://127.0.0.1:", "http://[::1]:"))
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key="k1", max_retries=0) as client:
            assert [model.id async for model in client.models.list()] == ["org/tiny"]
    finally:
        await server.stop()
