"""Agents that are services: one request an episode, and every answer is a result."""

import asyncio
from typing import Any

import pytest
from aiohttp import web

from gspo_services.tasks.agents import AgentResult, AgentService
from tests.support.agent_pools import agent_task
from tests.support.rewards.services import Handler, served


async def solve(handle: Handler, **options: Any) -> AgentResult:
    async with served(handle) as url, AgentService(url, **options) as service:
        return await service.solve(agent_task("any", deadline_s=30.0, number=5))


async def test_a_service_gets_the_episode_and_answers_with_its_reward() -> None:
    got: list[Any] = []

    async def handle(request: web.Request) -> web.Response:
        got.append(await request.json())
        return web.json_response({"reward": {"right": 1.0, "short": 0.5}})

    result = await solve(handle, weights={"right": 2.0, "short": 1.0})
    assert result == AgentResult(reward=2.5, components={"right": 1.0, "short": 0.5})
    assert got == [
        {
            "task": {"do": "any", "number": 5},
            "seed": 7,
            "base_url": "http://127.0.0.1:9/v1",
            "api_key": "episode-key",
            "model": "policy",
        }
    ]


async def test_a_service_may_reward_each_turn() -> None:
    async def handle(_: web.Request) -> web.Response:
        return web.json_response({"reward": {"turns": [0, 1], "short": 0.5}})

    result = await solve(handle, weights={"short": 2.0})
    assert result == AgentResult(reward=2.0, turns=[0.0, 2.0], components={"short": 0.5})


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (200, '{"turns": [1, null]}', "not_finite"),
        (200, '{"reward": "one"}', "not_finite"),
        (200, '{"reward": NaN}', "no_result"),
        (200, '{"reward": null}', "not_finite"),
        (200, "<html>", "no_result"),
        (200, "", "no_result"),
        (200, "1" * 70_000, "too_large"),
        (500, '{"reward": 1.0}', "refused"),
        (302, "", "refused"),
    ],
)
async def test_an_answer_without_a_reward_is_a_result_with_its_reason(status: int, body: str, reason: str) -> None:
    async def handle(request: web.Request) -> web.Response:
        return web.Response(status=status, text=body, headers={"Location": "/solve"})

    result = await solve(handle)
    assert (result.reward, result.failure) == (None, reason), result


async def test_a_redirection_is_not_followed() -> None:
    async def handle(request: web.Request) -> web.Response:
        if "again" in request.query:
            return web.json_response({"reward": 1.0})
        return web.Response(status=307, headers={"Location": "/solve?again=yes"})

    assert (await solve(handle)).failure == "refused", "the policy's key goes to the service that was named"


async def test_a_service_that_does_not_answer_is_given_up_at_the_deadline() -> None:
    hears_the_end = asyncio.Event()

    async def handle(request: web.Request) -> web.Response:
        try:
            await asyncio.Event().wait()
        finally:
            hears_the_end.set()
        return web.Response()

    async with served(handle) as url, AgentService(url) as service:
        result = await service.solve(agent_task("any", deadline_s=0.2))
    assert result.failure == "deadline"


async def test_a_service_that_is_not_there_or_hangs_up_is_unreachable() -> None:
    async def hang_up(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    assert (await solve(hang_up)).failure == "unreachable"
    async with served(hang_up) as url:
        pass
    async with AgentService(url) as service:
        result = await service.solve(agent_task("any"))
    assert (result.failure, url in result.detail) == ("unreachable", True)
    async with AgentService("not a url") as service:
        assert (await service.solve(agent_task("any"))).failure in ("refused", "unreachable")
