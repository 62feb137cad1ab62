"""Agents written with frameworks, as they are: the endpoint and the key are all they need."""

import asyncio
from typing import Any

import pytest

from gspo_services.rollout.endpoint import CallAnswer, CallRequest, ToolCall
from tests.frameworks.framework_examples import EXAMPLES, TASK
from tests.frameworks.played import ROOT, Dialogue, calls_tool, roles, says, stage
from tests.support.agent_pools import ListJournal
from tests.support.scripted_episodes import answer

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(1200)]


def seller(request: CallRequest) -> CallAnswer:
    """Looks, calculates and answers."""
    turn = roles(request).count("assistant")
    if turn == 0:
        return calls_tool("look", item="fig")
    if turn == 1:
        return calls_tool("multiply", a=int(request.messages[-1]["content"]), b=7)
    return answer(request.messages[-1]["content"])


@pytest.mark.parametrize("function", EXAMPLES)
async def test_an_example_calls_its_tools_and_gets_its_reward(function: str) -> None:
    good, poor, endless = Dialogue(seller), Dialogue(says("?")), Dialogue(lambda _: calls_tool("look", item="hat"))
    journal = ListJournal()
    async with stage(function, "agents", calls={"good": good, "poor": poor, "endless": endless}) as at:
        results = [await at.play(TASK, "good", journal=journal), await at.play(TASK, "poor"), await at.play(TASK, "endless")]
        assert at.overridden() == 0
    assert [(result.reward, result.detail) for result in results] == [(1.0, ""), (0.0, ""), (0.0, "")]
    assert journal.calls == [("record", "look", 0, "31")]
    assert [roles(request) for request in good.requests] == [
        ["user"],
        ["user", "assistant", "tool"],
        ["user", "assistant", "tool", "assistant", "tool"],
    ]
    assert {tool["function"]["name"] for tool in good.requests[0].tools} == {"look", "multiply", "add"}
    assert len(endless.requests) == 4


@pytest.mark.parametrize("function", EXAMPLES)
async def test_calls_of_one_turn_are_steps_one_after_another(function: str) -> None:
    def both(request: CallRequest) -> CallAnswer:
        if roles(request)[-1] == "tool":
            return answer(" ".join(message["content"] for message in request.messages if message["role"] == "tool"))
        wanted = [ToolCall(id="", name="look", arguments=f'{{"item": "{item}"}}') for item in ("hat", "fig")]
        return answer(None, tool_calls=wanted)

    journal = ListJournal()
    async with stage(function, "agents", calls={"k1": Dialogue(both)}) as at:
        result = await at.play({**TASK, "answer": "90 31"}, journal=journal)
    assert (result.reward, result.detail) == (1.0, "")
    assert journal.calls == [("record", "look", 0, "90"), ("record", "look", 1, "31")]


@pytest.mark.parametrize("transport", ["stdio", "streamable-http"])
async def test_tools_of_an_mcp_server_are_used_through_openai_agents(transport: str) -> None:
    dialogues = {f"k{number}": Dialogue(seller) for number in range(3)}
    task = {**TASK, "transport": transport, "server": str(ROOT / "tests/frameworks/shop_mcp.py")}
    async with stage("tests.frameworks.mcp_agent:solve", "agents", calls=dialogues) as at:
        results = await asyncio.gather(*(at.play(task, key) for key in dialogues))
    assert [(result.reward, result.detail) for result in results] == [(1.0, "")] * 3
    offered: list[dict[str, Any]] = dialogues["k0"].requests[0].tools
    assert [tool["function"]["name"] for tool in offered] == ["look", "multiply"]
    assert [tool["function"]["description"] for tool in offered] == ["The price of an item.", "The product of two numbers."]
