"""Peers that answer over HTTP have a deadline and a number of bytes, and what they do wrong is theirs."""

import asyncio
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from typing import Final

import aiohttp
import pytest

from gspo.tasks.environments import RewardJob
from gspo.tasks.judge.connection import JudgeConnection, JudgeError
from gspo_services.cli.doctor.observe import read_page
from gspo_services.learner.teacher import TeacherError, TeacherServer
from gspo_services.rollout.sglang.http import EngineError, EngineHttp
from gspo_services.rollout.sglang.metrics import EngineMetrics
from gspo_services.tasks.environments.reward_service import RewardService
from tests.support.lying_peer import LIES, MIB, Lie, lying_peer

DEADLINE_S: Final = 1.0
SPARE_S: Final = 8.0
"""A machine may be busy; a client that is held would be so for as long as it is talked to."""
MOST_BYTES: Final = 64 * MIB


async def teacher(url: str) -> str:
    server = TeacherServer(url, timeout_s=DEADLINE_S, retry_s=0.0)
    with pytest.raises(TeacherError) as raised:
        await asyncio.to_thread(server.score, {0: [5, 6, 7]}, {})
    return str(raised.value)


async def reward_service(url: str) -> str:
    service = RewardService()
    try:
        result = await service.grade(RewardJob(url=url, arguments={}, deadline_s=DEADLINE_S))
    finally:
        await service.close()
    assert result.reward is None
    return str(result)


async def judge(url: str) -> str:
    connection = JudgeConnection("m", DEADLINE_S, 0, url, "key")
    try:
        with pytest.raises(JudgeError) as raised:
            await connection.ask({"model": "m", "messages": []})
    finally:
        await connection.close()
    return str(raised.value)


async def engine(url: str, call: Callable[[EngineHttp], Awaitable[object]]) -> str:
    http = EngineHttp(url, timeout_s=DEADLINE_S, stall_timeout_s=DEADLINE_S)
    try:
        with pytest.raises(EngineError) as raised:
            await call(http)
    finally:
        await http.aclose()
    return str(raised.value)


async def engine_post(url: str) -> str:
    return await engine(url, lambda http: http.get("/x", dict[str, int]))


async def _all(http: EngineHttp, *, stream: bool) -> None:
    answers = [answer async for answer in http.answers(b"{}", stream=stream)]
    raise EngineError(f"{http} gave {len(answers)} answers, which the client reads")


async def engine_answer(url: str) -> str:
    return await engine(url, lambda http: _all(http, stream=False))


async def engine_stream(url: str) -> str:
    return await engine(url, lambda http: _all(http, stream=True))


async def engine_metrics(url: str) -> str:
    assert await asyncio.to_thread(EngineMetrics(url, timeout_s=DEADLINE_S)._fetch) in (None, [])
    return url


async def doctor(url: str) -> str:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S)) as session:
        page = await read_page(session, url)
    return str(page.text)


CLIENTS: Final = (
    teacher, reward_service, judge, engine_post, engine_answer, engine_stream, engine_metrics, doctor
)  # fmt: skip


async def _asked(client: Callable[[str], Awaitable[str]], name: str, lie: Lie) -> str:
    """What is wrong with the client; empty: it said whose fault it was, in time."""
    async with lying_peer(lie) as url:
        begin = time.monotonic()
        try:
            async with asyncio.timeout(20.0):
                await client(url)
        except TimeoutError:
            return f"{name}: hangs"
        took = time.monotonic() - begin
    return "" if took < 2 * DEADLINE_S + SPARE_S else f"{name}: {took:.1f} s"


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.__name__)
async def test_no_peer_holds_a_client_beyond_its_deadline_or_its_bytes(client: Callable[[str], Awaitable[str]]) -> None:
    quick = {name: lie for name, lie in LIES.items() if "endless" not in name and name not in ("a bomb", "a huge length")}
    found = await asyncio.gather(*(_asked(client, name, lie) for name, lie in quick.items()))
    for name in LIES.keys() - quick.keys():
        tracemalloc.start()
        found.append(await _asked(client, name, LIES[name]))
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        found.append("" if most < MOST_BYTES else f"{name}: {most / MIB:.0f} MiB")
    assert [each for each in found if each] == []
