"""Rewards from a service: what it is asked, and every answer and silence is a result."""

import asyncio
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from aiohttp import web

from gspo.tasks.environments import RewardJob
from gspo_services.tasks.environments.reward_pool import RewardPool, RewardPoolOptions, RewardResult
from gspo_services.tasks.json_rewards.client import seconds_to_wait
from gspo_services.tasks.worker.frames import MAX_MESSAGE_BYTES
from tests.support.rewards.services import Handler, served

JOB = {"arguments": {"completion": "four"}, "with_task": True, "deadline_s": 30.0}


async def graded(handle: Handler, **fields: Any) -> RewardResult:
    async with served(handle) as url, RewardPool() as pool:
        return await pool.grade(RewardJob(**{**JOB, "url": url, **fields}).for_task({"prompt": "2+2"}))


def answering(*answers: tuple[int, str]) -> Handler:
    """Answers in turn; the last one for ever."""
    left = list(answers)

    async def handle(request: web.Request) -> web.Response:
        status, body = left.pop(0) if len(left) > 1 else left[0]
        return web.Response(status=status, text=body, headers={"Location": "/elsewhere"})

    return handle


async def test_a_service_gets_the_arguments_and_its_components_are_weighted() -> None:
    got: list[Any] = []

    async def handle(request: web.Request) -> web.Response:
        got.append((request.content_type, await request.json()))
        return web.json_response({"reward": {"right": 1.0, "style": 0.5}})

    result = await graded(handle, weights={"right": 2.0, "style": 0.5})
    assert result == RewardResult(reward=2.25, components={"right": 1.0, "style": 0.5})
    assert got == [("application/json", {"completion": "four", "task": {"prompt": "2+2"}})]


@pytest.mark.parametrize(
    ("status", "body", "reason", "detail"),
    [
        (200, '{"reward": "one"}', "not_finite", "'one'"),
        (200, '{"reward": NaN}', "no_result", "is not JSON"),
        (200, "NaN", "not_finite", "is not JSON"),
        (200, '{"reward": 1e999}', "no_result", "is not JSON"),
        (200, '{"reward": null}', "not_finite", "None"),
        (200, '{"reward": {"right": 1}}', "missing_component", '"style"'),
        (200, '{"reward": 1}', "missing_component", "is one number"),
        (200, "<html>", "no_result", "<html>"),
        (200, "", "no_result", "is not JSON"),
        (200, "1" * 70_000, "too_large", "65536"),
        (200, '{"reward": {' + ", ".join(f'"c{n}": 0' for n in range(17)) + "}}", "bad_component", "17 components"),
        (201, '{"reward": 1}', "refused", "answered 201"),
        (307, "", "refused", "answered 307 and points to /elsewhere: name that place"),
        (400, "no such task", "refused", "answered 400: no such task"),
        (404, '{"reward": 1.0}', "refused", "answered 404"),
    ],
)
async def test_an_answer_without_a_reward_is_a_failure_with_its_reason(
    status: int, body: str, reason: str, detail: str
) -> None:
    weights = {"right": 1.0, "style": 1.0} if reason == "missing_component" else None
    result = await graded(answering((status, body)), weights=weights)
    assert (result.reward, result.failure, detail in result.detail) == (None, reason, True), result


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504, 529])
async def test_a_service_that_is_busy_or_fails_is_asked_again(status: int) -> None:
    result = await graded(answering((status, ""), (200, "1.5")))
    assert (result.reward, result.failure) == (1.5, None)


async def test_a_service_that_hangs_up_is_asked_again() -> None:
    asked: list[int] = []

    async def hang_up(request: web.Request) -> web.Response:
        asked.append(1)
        if len(asked) == 1:
            assert request.transport is not None
            request.transport.close()
        return web.json_response({"reward": 1})

    assert (await graded(hang_up)).reward == 1.0


async def test_a_service_that_stays_away_is_named_with_its_last_error() -> None:
    busy = await graded(answering((503, "starting")), deadline_s=0.6)
    assert (busy.failure, "answered 503: starting (asked for 0.6 s," in busy.detail) == ("refused", True), busy
    async with served(answering((200, "1"))) as url:
        pass
    async with RewardPool() as pool:
        gone = await pool.grade(RewardJob(url=url, arguments={}, deadline_s=0.3))
    assert (gone.failure, url in gone.detail) == ("unreachable", True), gone


@pytest.mark.parametrize("as_date", [False, True])
async def test_a_service_is_left_alone_for_as_long_as_it_says(as_date: bool) -> None:
    clock = asyncio.get_running_loop().time
    asked: list[float] = []

    async def handle(request: web.Request) -> web.Response:
        asked.append(clock())
        if len(asked) > 1:
            return web.json_response(1)
        # A date has whole seconds: this one is between 2 and 3 away.
        until = format_datetime(datetime.now(tz=UTC) + timedelta(seconds=3), usegmt=True)
        return web.Response(status=429, headers={"Retry-After": until if as_date else "2"})

    assert (await graded(handle)).reward == 1.0
    assert 1.9 <= asked[1] - asked[0] < 10


async def test_a_service_that_wants_to_be_left_alone_for_longer_than_the_deadline_is_not_asked_again() -> None:
    asked: list[int] = []

    async def handle(request: web.Request) -> web.Response:
        asked.append(1)
        return web.Response(status=503, headers={"Retry-After": "600"})

    result = await graded(handle, deadline_s=1.0)
    assert (result.failure, len(asked), "wants to be left alone for 600 s" in result.detail) == ("refused", 1, True), result


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("120", 120.0), (" 0 ", 0.0), ("9" * 400, 86_400.0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0), ("", None),
     ("soon", None), ("-3", None), ("1.5", None), ("nan", None), ("\u0663", None)],
)  # fmt: skip
def test_what_a_retry_after_says(header: str, seconds: float | None) -> None:
    assert seconds_to_wait(header, "") == seconds


def test_a_date_is_read_by_the_clock_of_the_service_that_says_it() -> None:
    until, sent = "Wed, 21 Oct 2015 07:28:30 GMT", "Wed, 21 Oct 2015 07:28:00 GMT"
    assert [seconds_to_wait(until, at) for at in (sent, "odd", "")] == [30.0, 0.0, 0.0]


async def test_one_hung_request_costs_a_second_one_and_not_the_attempt() -> None:
    asked: list[int] = []

    async def handle(request: web.Request) -> web.Response:
        asked.append(1)
        if len(asked) == 1:
            await asyncio.Event().wait()
        return web.json_response({"reward": 1})

    result = await graded(handle, deadline_s=4.0)
    assert (result.reward, len(asked)) == (1.0, 2)


async def test_a_service_that_is_just_slow_is_waited_for() -> None:
    """It answers late in its deadline, and its answer to the repeated request would come after that."""

    async def handle(request: web.Request) -> web.Response:
        await asyncio.sleep(3)
        return web.json_response({"reward": 1})

    assert (await graded(handle, deadline_s=5.0)).reward == 1.0


async def test_a_hung_request_whose_repetition_fails_is_still_waited_for() -> None:
    asked: list[int] = []

    async def handle(request: web.Request) -> web.Response:
        asked.append(1)
        if len(asked) > 1:
            return web.Response(status=500)
        await asyncio.sleep(3)
        return web.json_response({"reward": 1})

    assert (await graded(handle, deadline_s=5.0)).reward == 1.0


async def test_a_url_that_is_none_is_refused_at_once() -> None:
    async with RewardPool() as pool:
        result = await pool.grade(RewardJob(url="not a url", arguments={}, deadline_s=600))
    assert (result.failure, "not a url" in result.detail) == ("refused", True)


async def test_silence_until_the_deadline_is_a_failure_and_never_zero() -> None:
    async def handle(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        return web.Response()

    async with served(handle) as url, RewardPool(RewardPoolOptions(on_deadline="zero")) as pool:
        result = await pool.grade(RewardJob(url=url, arguments={}, deadline_s=0.2))
        assert (result.reward, result.failure) == (None, "deadline"), "the service is to blame, not the policy"


@pytest.mark.parametrize(
    ("arguments", "reason"), [({"completion": object()}, "bad_job"), ({"x": "y" * (MAX_MESSAGE_BYTES + 1)}, "too_large")]
)
async def test_a_job_that_no_service_can_get_is_a_failure(arguments: dict[str, Any], reason: str) -> None:
    result = await graded(answering((200, "1")), arguments=arguments)
    assert (result.reward, result.failure) == (None, reason)


async def test_closing_the_pool_ends_what_is_asked_and_what_would_be() -> None:
    asked = asyncio.Event()

    async def handle(request: web.Request) -> web.Response:
        asked.set()
        await asyncio.Event().wait()
        return web.Response()

    async with served(handle) as url:
        job = RewardJob(url=url, arguments={}, deadline_s=600)
        pool = RewardPool()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(pool.grade(job), name="running")
            await asked.wait()
            await pool.close()
        assert running.result().failure == "closed", running.result()
        assert (await pool.grade(job)).failure == "closed"


def test_environments_need_no_http_client() -> None:
    """The broker's image has none (requirements/broker.txt)."""
    code = "import sys, gspo_services.tasks.environments; print('aiohttp' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "False"
