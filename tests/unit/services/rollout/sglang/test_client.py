"""The engine client against a server that misbehaves on purpose."""

import asyncio
import json
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

from gspo_services.rollout.sglang.client import (
    Engine,
    EngineError,
    EngineRefused,
    EngineUnreachable,
)
from gspo_services.rollout.sglang.engine_adapters import Adapter
from gspo_services.rollout.sglang.generation import GenerateRequest, SamplingParameters
from gspo_services.rollout.sglang.http import EngineHttp
from gspo_services.rollout.sglang.memory import CACHE_MEMORY, WEIGHTS_MEMORY
from tests.support.engines.scripted_sglang import INFO, answer, ask, event, scripted, stream
from tests.support.processes.ports import free_port


async def test_a_stream_that_breaks_off_is_not_taken_for_an_answer() -> None:
    async with scripted(lambda path, body: stream(event([5, 6, 7, 8], 4))) as (engine, _):
        pieces = engine.generate(GenerateRequest(rid="r", input_ids=[1], sampling=SamplingParameters(max_new_tokens=9)))
        assert (await anext(pieces)).token_ids.tolist() == [5, 6, 7, 8]
        with pytest.raises(EngineUnreachable, match="before its end"):
            await anext(pieces)


async def test_comments_other_fields_and_a_cut_off_event_are_skipped_and_both_line_ends_are_read() -> None:
    events = [json.dumps(event([token], total)).encode() for total, token in enumerate((5, 6, 7, 8), 1)]
    lines = b": ping\n\nevent: x\r\nid: 3\r\ndata: %b\r\n\r\ndata:%b\n\n\n\ndata: %b\n\ndata: %b" % tuple(events)
    async with scripted(lambda path, body: b"HTTP/1.1 200 OK\r\n\r\n" + lines, chunk_tokens=3) as (engine, _):
        pieces = engine.generate(GenerateRequest(rid="r", input_ids=[1], sampling=SamplingParameters(max_new_tokens=9)))
        assert (await anext(pieces)).token_ids.tolist() == [5, 6, 7]
        with pytest.raises(EngineUnreachable, match="before its end"):
            await anext(pieces)


async def test_an_event_without_end_is_an_engine_error() -> None:
    endless = b"HTTP/1.1 200 OK\r\n\r\ndata: " + b"x" * (17 << 20)
    async with scripted(lambda path, body: endless) as (engine, _):
        with pytest.raises(EngineError, match="limit of 16777216 bytes"):
            await ask(engine, 9)


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (answer(400, {"error": {"message": "too long"}}), EngineRefused),
        (answer(200, {"error": {"message": "too long"}}), EngineRefused),
        (answer(422, {"error": {"message": "cannot be processed"}}), EngineRefused),
        (answer(500, {"error": {"message": "CUDA error"}}), EngineError),
        (answer(503, {"error": {"message": "the queue is full"}}), EngineError),
        (answer(404, {"detail": "Not Found"}), EngineError),
        (answer(200, {"error": {"message": "the queue is full", "code": 503}}), EngineError),
        (answer(200, {"output_ids": []}), EngineRefused),
        (answer(200, event([5], 1, "stop", version="default")), EngineError),
        (answer(200, event([5], 2, "stop")), EngineError),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nxx", EngineError),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 200\r\n\r\nxx", EngineUnreachable),
        (b"not http", EngineUnreachable),
        (b"", EngineUnreachable),
    ],
)
async def test_every_mistake_of_the_server_becomes_one_of_our_errors(reply: bytes, error: type[EngineError]) -> None:
    async with scripted(lambda path, body: reply) as (engine, _):
        with pytest.raises(EngineError) as raised:
            await ask(engine)
    assert raised.type is error


async def test_a_server_with_an_unreadable_answer_leaves_no_connection_open() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        ended.set_result(await reader.read())
        writer.close()

    ended: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        with pytest.raises(EngineError, match="ServerInfo"):
            async with Engine(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"):
                pass
        assert await asyncio.wait_for(ended, 10.0) == b""


async def test_a_server_that_has_gone_is_unreachable_and_refuses_no_request() -> None:
    http = EngineHttp(f"http://127.0.0.1:{free_port()}", timeout_s=5.0, stall_timeout_s=5.0)
    try:
        with pytest.raises(EngineUnreachable, match="ClientConnectorError"):
            await anext(http.answers(b"{}", stream=False))
    finally:
        await http.aclose()


async def test_an_abort_does_not_hide_a_stop_token_or_the_length_limit() -> None:
    async with scripted(lambda path, body: answer(200, event([5, 6], 2, "abort"))) as (engine, _):
        assert [piece.finish_reason for piece in await ask(engine, 3)] == ["abort"]
        assert [piece.finish_reason for piece in await ask(engine, 3, stop_token_ids=(6,))] == ["stop"]
        assert [piece.finish_reason for piece in await ask(engine, 2)] == ["length"]


async def test_no_request_id_at_the_server_is_used_twice_or_is_the_beginning_of_another() -> None:
    names = []
    for _ in range(2):
        async with scripted(lambda path, body: answer(200, event([5], 1, "stop"))) as (engine, asked):
            for _ in range(12):
                await ask(engine)
        names += [body["rid"] for path, body in asked if path == "/generate"]
    assert len(set(names)) == 24
    assert not [(a, b) for a in names for b in names if a != b and b.startswith(a)]


async def test_a_request_under_way_cannot_be_sent_twice() -> None:
    async with scripted(lambda path, body: stream(event([5, 6, 7, 8], 4))) as (engine, _):
        request = GenerateRequest(rid="r", input_ids=[1], sampling=SamplingParameters(max_new_tokens=9))
        first = engine.generate(request)
        await anext(first)
        with pytest.raises(ValueError, match="under way"):
            await anext(engine.generate(request))
        await first.aclose()


async def test_after_an_update_to_another_version_than_asked_the_engine_refuses() -> None:
    ok = answer(200, {"success": True, "message": ""})
    async with scripted(lambda path, body: ok, served_version="4") as (engine, asked):
        with pytest.raises(EngineError, match="reports 4"):
            await engine.update_weights_from_disk(Path("/w"), 5)
        with pytest.raises(EngineError, match="weights are unknown"):
            await ask(engine)
        await engine.update_weights_from_disk(Path("/w"), 4)
        await engine.pause("in_place")
        await engine.update_weights_from_disk(Path("/w"), 4)
    updates = [body for path, body in asked if path == "/update_weights_from_disk"]
    assert [(body["weight_version"], body["flush_cache"]) for body in updates] == [("5", True), ("4", True), ("4", False)]


async def test_memory_is_released_once_while_paused_and_comes_back_in_two_steps_before_anything_is_generated() -> None:
    async with scripted(lambda path, body: answer(200, {"success": True})) as (engine, asked):
        for mode in (None, "in_place"):
            if mode is not None:
                await engine.pause(mode)
            with pytest.raises(ValueError, match=f"paused with mode {mode}: it is idle only after a pause with retract"):
                await engine.release_memory()
        await engine.pause("retract")
        await engine.release_memory()
        await engine.release_memory()
        await engine.memory.take_back(WEIGHTS_MEMORY)
        await engine.memory.take_back(WEIGHTS_MEMORY)
        with pytest.raises(EngineError, match=r"weights are unknown \(failed update, or another process used the GPU\)"):
            await ask(engine)
        await engine.update_weights_from_disk(Path("/w"), 1)
        await engine.memory.take_back(CACHE_MEMORY)
    memory = [(path, body["tags"]) for path, body in asked if path.endswith("memory_occupation")]
    assert memory == [
        ("/release_memory_occupation", ["kv_cache", "weights"]),
        ("/resume_memory_occupation", ["weights"]),
        ("/resume_memory_occupation", ["kv_cache"]),
    ]


async def test_memory_that_the_server_refuses_to_release_is_asked_for_again() -> None:
    def reply(path: str, body: Any) -> bytes:
        return answer(500 if path.startswith("/release") and len(asked) < 4 else 200, {})

    async with scripted(reply) as (engine, asked):
        await engine.pause("retract")
        with pytest.raises(EngineError, match="/release_memory_occupation: 500"):
            await engine.release_memory()
        await engine.memory.take_back(WEIGHTS_MEMORY)  # It has it.
        await engine.release_memory()
    assert [path for path, _ in asked if path.endswith("memory_occupation")] == ["/release_memory_occupation"] * 2


async def test_an_update_counts_only_after_the_check_of_the_loaded_weights() -> None:
    async def check() -> None:
        async with asyncio.timeout(60):
            while asked[-1][0] != "/model_info":  # noqa: ASYNC110 - the question comes meanwhile
                await asyncio.sleep(0.001)
        checked.append(len(checked))
        if len(checked) == 1:
            raise EngineError("something else was loaded")

    checked: list[int] = []
    async with scripted(lambda path, body: answer(200, {"success": True}), served_version="4") as (engine, asked):
        with pytest.raises(EngineError, match="something else was loaded"):
            await engine.update_weights_from_disk(Path("/w"), 4, check=check)
        with pytest.raises(EngineError, match="weights are unknown"):
            await ask(engine)
        await engine.update_weights_from_disk(Path("/w"), 4, check=check)
    assert checked == [0, 1]


async def outcome(awaitable: Awaitable[Any]) -> Any:
    """The result, or the EngineError that is raised."""
    try:
        return await awaitable
    except EngineError as error:
        return error


@pytest.mark.parametrize("update_succeeds", [True, False])
async def test_an_answer_that_arrives_during_an_update_waits_for_its_outcome(update_succeeds: bool) -> None:
    generate_asked, update_asked = asyncio.Event(), asyncio.Event()
    answer_now, update_now = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).decode().split()[1]
        if path == "/generate":
            generate_asked.set()
            await answer_now.wait()
            writer.write(answer(200, event([5, 6], 2, "stop")))
        elif path == "/update_weights_from_disk":
            update_asked.set()
            await update_now.wait()
            writer.write(answer(200 if update_succeeds else 500, {}))
        else:
            writer.write(answer(200, INFO if path == "/server_info" else {"weight_version": "2"}))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, Engine(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", chunk_tokens=4) as engine:
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(outcome(ask(engine)))
            await generate_asked.wait()
            updating = tasks.create_task(outcome(engine.update_weights_from_disk(Path("/w"), 2)))
            await update_asked.wait()
            answer_now.set()
            await asyncio.wait([asking], timeout=0.1)
            assert not asking.done()
            update_now.set()
    answered, updated = asking.result(), updating.result()
    if update_succeeds:
        assert updated is None
        assert isinstance(answered, list)
        assert [(piece.token_ids.tolist(), piece.version_runs[0].version) for piece in answered] == [([5, 6], 1)]
    else:
        assert "weights are unknown" in str(answered)
        assert "500" in str(updated)


async def test_token_ids_are_checked_before_anything_is_sent() -> None:
    async with scripted(lambda path, body: answer(200, event([5], 1, "stop"))) as (engine, asked):
        for bad in ([100], [-1, 3]):
            with pytest.raises(ValueError, match="vocabulary has 100"):
                await anext(
                    engine.generate(GenerateRequest(rid="r", input_ids=bad, sampling=SamplingParameters(max_new_tokens=1)))
                )
    assert [path for path, _ in asked] == ["/server_info"]


async def test_no_more_requests_than_allowed_are_at_the_server_at_once() -> None:
    async with scripted(lambda path, body: stream(event([5, 6, 7, 8], 4)), max_concurrency=1) as (engine, asked):
        sampling = SamplingParameters(max_new_tokens=9)
        first = engine.generate(GenerateRequest(rid="a", input_ids=[1], sampling=sampling))
        await anext(first)
        second = engine.generate(GenerateRequest(rid="b", input_ids=[1], sampling=sampling))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(second), 0.05)
        assert [path for path, _ in asked].count("/generate") == 1
        await first.aclose()


async def ask_together(engine: Engine, *max_tokens: int) -> list[Any]:
    """The finish reasons or errors of requests that begin in the same turn of the loop."""

    async def one(name: str, num_tokens: int) -> Any:
        sampling = SamplingParameters(max_new_tokens=num_tokens)
        return [
            piece.finish_reason
            async for piece in engine.generate(GenerateRequest(rid=name, input_ids=[1], sampling=sampling))
        ]

    asked = (one(f"r{place}", num_tokens) for place, num_tokens in enumerate(max_tokens))
    return await asyncio.gather(*asked, return_exceptions=True)


async def test_only_short_answers_without_an_adapter_are_asked_for_together() -> None:
    def reply(path: str, body: Any) -> bytes:
        ended = event([5], 1, "stop")
        return answer(200, [ended] * len(body["rid"]) if isinstance(body["rid"], list) else ended)

    async with scripted(reply, chunk_tokens=64) as (engine, asked):
        assert await ask_together(engine, 3, 16, 17, 8) == [["stop"]] * 4
        sampled = [body for path, body in asked if path == "/generate"]
        assert [body["sampling_params"]["max_new_tokens"] for body in sampled if isinstance(body["rid"], str)] == [17]
        assert [
            [each["max_new_tokens"] for each in body["sampling_params"]] for body in sampled if isinstance(body["rid"], list)
        ] == [[3, 16, 8]]
        asked.clear()
        engine.serve({"": Adapter(name="v1", version=1, base_version=1)})
        assert await ask_together(engine, 3, 3) == [["stop"]] * 2
        assert [body["rid"][:3] for _, body in asked] == ["r0#", "r1#"]


async def test_of_requests_that_are_refused_together_only_the_guilty_one_is_refused() -> None:
    def reply(path: str, body: Any) -> bytes:
        if isinstance(body["rid"], list) or body["sampling_params"]["max_new_tokens"] == 4:
            return answer(400, {"error": {"message": "too long"}})
        return answer(200, event([5], 1, "stop"))

    async with scripted(reply) as (engine, asked):
        first, second, third = await ask_together(engine, 3, 4, 2)
        assert (first, third) == (["stop"], ["stop"])
        assert isinstance(second, EngineRefused)
        rids = [rid for path, body in asked[1:] for rid in ([body["rid"]] if isinstance(body["rid"], str) else body["rid"])]
        assert len(rids) == len(set(rids)) == 6  # SGLang must never see an id twice.


async def test_an_answer_that_ends_at_a_token_which_ends_none_here_shows_other_files() -> None:
    """A server stops at the end tokens of its own files, whatever a request names."""
    async with scripted(lambda path, body: answer(200, event([5, 6], 2, "stop"))) as (engine, _):
        with pytest.raises(EngineError, match=r"ended an answer at token 6, and model.path ends answers at 2, 7: "):
            await ask(engine, stop_token_ids=(2, 7))
        assert [piece.finish_reason for piece in await ask(engine, stop_token_ids=(6,))] == ["stop"]
        assert [piece.finish_reason for piece in await ask(engine)] == ["stop"]
