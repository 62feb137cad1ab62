"""Short answers that are asked for at the same time travel as one request, and each is worth what it is worth alone."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from gspo_services.rollout.sglang import joint
from gspo_services.rollout.sglang.http import EngineError, EngineHttp, EngineRefused, EngineUnreachable
from gspo_services.rollout.sglang.joint import AskAlone, JointRequests


class FakeHttp(EngineHttp):
    """Answers with ``reply(body)``, once ``may_answer`` is set."""

    def __init__(self, reply: Callable[[Any], Any]) -> None:
        super().__init__("http://nowhere", timeout_s=1.0, stall_timeout_s=1.0)
        self.reply = reply
        self.bodies: list[Any] = []
        self.asked = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def answers(self, body: bytes, *, stream: bool) -> AsyncGenerator[bytes, None]:
        assert not stream
        self.bodies.append(json.loads(body))
        self.asked.set()
        await self.may_answer.wait()
        yield json.dumps(self.reply(self.bodies[-1])).encode()


def fields(name: str, num_tokens: int = 2) -> dict[str, Any]:
    return {
        "rid": name,
        "input_ids": list(range(1, num_tokens + 1)),
        "stream": False,
        "return_logprob": True,
        "sampling_params": {"max_new_tokens": 3, "sampling_seed": len(name)},
    }


def named(body: Any) -> Any:
    """An answer that names its request; one of ``rid`` is the list of all."""
    return [{"of": rid} for rid in body["rid"]] if isinstance(body["rid"], list) else {"of": body["rid"]}


async def of_one(requests: JointRequests, asked: dict[str, Any]) -> Any:
    answers = [json.loads(payload) async for payload in requests.answers(asked)]
    assert len(answers) == 1
    return answers[0]


async def outcome(requests: JointRequests, asked: dict[str, Any]) -> Any:
    try:
        return await of_one(requests, asked)
    except (EngineError, AskAlone) as error:
        return error


async def of_all(requests: JointRequests, asked: list[dict[str, Any]]) -> list[Any]:
    return await asyncio.gather(*(outcome(requests, each) for each in asked))


async def test_what_is_asked_at_the_same_time_is_one_request_and_each_gets_its_own_answer() -> None:
    http = FakeHttp(named)
    asked = [fields("a"), fields("bb", 3), fields("ccc")]
    assert await of_all(JointRequests(http), asked) == [{"of": "a"}, {"of": "bb"}, {"of": "ccc"}]
    assert http.bodies == [
        {
            "stream": False,
            "return_logprob": True,
            **{name: [each[name] for each in asked] for name in ("rid", "input_ids", "sampling_params")},
        }
    ]


async def test_one_alone_is_asked_for_as_ever_and_waits_for_nobody() -> None:
    http = FakeHttp(named)
    requests = JointRequests(http)
    assert await of_one(requests, fields("a")) == {"of": "a"}
    assert await of_one(requests, fields("b")) == {"of": "b"}
    assert http.bodies == [fields("a"), fields("b")]


async def test_a_request_that_is_full_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint, "MAX_JOINT", 2)
    monkeypatch.setattr(joint, "MAX_JOINT_INPUT_TOKENS", 10)
    http = FakeHttp(named)
    asked = [fields("a"), fields("b"), fields("c"), fields("d", 9), fields("e"), fields("f", 99)]
    assert await of_all(JointRequests(http), asked) == [{"of": each["rid"]} for each in asked]
    assert [body["rid"] for body in http.bodies] == [["a", "b"], "c", "d", "e", "f"]


async def test_when_a_joint_request_is_refused_each_is_asked_for_alone() -> None:
    def refuse(body: Any) -> Any:
        raise EngineRefused("one of them is too long")

    requests = JointRequests(FakeHttp(refuse))
    assert [type(error) for error in await of_all(requests, [fields("a"), fields("b")])] == [AskAlone, AskAlone]
    assert [type(error) for error in await of_all(requests, [fields("a")])] == [EngineRefused]


async def test_an_error_of_the_engine_is_everyones_error() -> None:
    def fail(body: Any) -> Any:
        raise EngineUnreachable("nobody there")

    errors = await of_all(JointRequests(FakeHttp(fail)), [fields("a"), fields("b")])
    assert [(type(error), str(error)) for error in errors] == [(EngineUnreachable, "nobody there")] * 2


@pytest.mark.parametrize(("reply", "text"), [([{}], "2 samples were requested together, 1 came back"), ({}, "not a list")])
async def test_an_answer_that_is_not_one_for_each_is_an_engine_error(reply: Any, text: str) -> None:
    errors = await of_all(JointRequests(FakeHttp(lambda body: reply)), [fields("a"), fields("b")])
    assert [type(error) for error in errors] == [EngineError, EngineError]
    assert all(text in str(error) for error in errors)


async def test_when_the_one_that_sent_is_given_up_the_others_ask_alone() -> None:
    http = FakeHttp(named)
    http.may_answer.clear()
    requests = JointRequests(http)
    async with asyncio.TaskGroup() as group:
        first, second = (group.create_task(outcome(requests, fields(name))) for name in "ab")
        await http.asked.wait()
        first.cancel()
    assert first.cancelled()
    assert isinstance(second.result(), AskAlone)


async def test_given_up_before_it_left_it_is_not_joined_later() -> None:
    http = FakeHttp(named)
    requests = JointRequests(http)
    async with asyncio.TaskGroup() as group:
        first = group.create_task(outcome(requests, fields("a")))
        asyncio.get_running_loop().call_soon(first.cancel)
    assert first.cancelled()
    assert await of_one(requests, fields("b")) == {"of": "b"}
    assert http.bodies == [fields("b")]


async def test_one_that_is_given_up_leaves_the_others_their_answers() -> None:
    http = FakeHttp(named)
    http.may_answer.clear()
    requests = JointRequests(http)
    async with asyncio.TaskGroup() as group:
        first, second, third = (group.create_task(outcome(requests, fields(name))) for name in "abc")
        await http.asked.wait()
        second.cancel()
        http.may_answer.set()
    assert second.cancelled()
    assert [first.result(), third.result()] == [{"of": "a"}, {"of": "c"}]
