"""Environments of verifiers, played by the integration."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from gspo_services.rollout.endpoint import CallAnswer, CallRefused, CallRequest
from tests.frameworks.played import Dialogue, calls_tool, roles, says, stage
from tests.frameworks.verifiers_rows import SOLVE, SYSTEM, TASKSETS, odd
from tests.support.scripted_episodes import answer

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(1200)]


def sums(problem: str = "12+7=", right: str = "19", **env: Any) -> dict[str, Any]:
    """A row of the example's taskset."""
    return {"env": {"taskset": {"id": "verifiers_sums"}, **env}, "task": {"idx": 0, "prompt": problem, "answer": right}}


async def test_an_episode_has_the_rewards_of_the_environment_by_name_and_with_its_weights() -> None:
    dialogues = {"right": Dialogue(says("19")), "wrong": Dialogue(says("20")), "words": Dialogue(says("nineteen"))}
    async with stage(SOLVE, "verifiers", calls=dialogues, environment=TASKSETS) as at:
        results = await asyncio.gather(*(at.play(sums(), key) for key in dialogues))
        assert at.overridden() == 0
    assert [result.components for result in results] == [
        {"right": 1.0, "a_number": 0.1},
        {"right": 0.0, "a_number": 0.1},
        {"right": 0.0, "a_number": 0.0},
    ]
    assert [result.reward for result in results] == pytest.approx([1.1, 0.1, 0.0])
    (request,) = dialogues["right"].requests
    assert request == CallRequest(messages=[{"role": "user", "content": "12+7="}])


async def test_many_episodes_of_one_worker_make_their_own_calls_only() -> None:
    dialogues = {f"k{number}": Dialogue(says(str(number))) for number in range(24)}
    async with stage(SOLVE, "verifiers", calls=dialogues, environment=TASKSETS) as at:
        tasks = [sums(f"{number}+0=", str(number)) for number in range(24)]
        results = await asyncio.gather(*(at.play(task, key) for task, key in zip(tasks, dialogues, strict=True)))
    assert Counter(result.reward for result in results) == {1.1: 24}
    for number, dialogue in enumerate(dialogues.values()):
        assert [request.messages[0]["content"] for request in dialogue.requests] == [f"{number}+0="]


def uses_the_tool(request: CallRequest) -> CallAnswer:
    """First a call of the tool, then what the tool said."""
    if roles(request)[-1] == "user":
        return calls_tool("shelf_price", name="tea")
    return answer(f"It costs {request.messages[-1]['content']}.")


async def test_the_policy_uses_the_tools_of_a_task_and_reads_what_they_say() -> None:
    dialogue = Dialogue(uses_the_tool)
    async with stage(SOLVE, "verifiers", calls={"k1": dialogue}, environment=TASKSETS) as at:
        result = await at.play(odd("tools"))
    assert (result.detail, result.components) == ("", {"says_the_price": 1.0})
    first, second = dialogue.requests
    assert [tool["function"]["name"] for tool in first.tools] == ["shelf_price"]
    assert roles(first) == ["system", "user"]
    assert roles(second) == ["system", "user", "assistant", "tool"]


async def test_a_call_that_no_tool_understands_is_answered_with_what_is_wrong() -> None:
    def calling(tool: str, /, **arguments: Any) -> Dialogue:
        return Dialogue(lambda asked: calls_tool(tool, **arguments) if roles(asked)[-1] == "user" else answer("I give up."))

    dialogues = {"name": calling("shelf_prize", name="tea"), "arguments": calling("shelf_price", nam="tea")}
    async with stage(SOLVE, "verifiers", calls=dialogues, environment=TASKSETS) as at:
        for key in dialogues:
            assert (await at.play(odd("tools"), key)).components == {"says_the_price": 0.0}
    told = {key: dialogue.requests[-1].messages[-1]["content"] for key, dialogue in dialogues.items()}
    assert told["name"] == "error: unknown tool 'shelf_prize'"
    assert "Field required" in told["arguments"]


async def test_an_environment_that_speaks_between_the_turns_continues_one_conversation() -> None:
    dialogue = Dialogue(says("a", "b", "c"))
    async with stage(SOLVE, "verifiers", calls={"k1": dialogue}, environment=TASKSETS) as at:
        result = await at.play(odd("talk", None))
    assert (result.detail, result.components) == ("", {"turns": 3.0})
    assert [roles(request) for request in dialogue.requests] == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
        ["system", "user", "assistant", "user", "assistant", "user"],
    ]
    assert [message["content"] for message in dialogue.requests[-1].messages] == [
        SYSTEM,
        "say 0",
        "a",
        "say 1",
        "b",
        "say 2",
    ]


async def test_what_ends_an_episode_early_leaves_it_scored() -> None:
    full = CallRefused(400, "context_length_exceeded", "this episode's calls may have 96 tokens in total")

    def until_full(request: CallRequest) -> CallAnswer | CallRefused:
        return calls_tool("shelf_price", name="tea") if roles(request)[-1] == "user" else full

    dialogues = {"full": Dialogue(until_full), "turns": Dialogue(lambda _: calls_tool("shelf_price", name="tea"))}
    async with stage(SOLVE, "verifiers", calls=dialogues, environment=TASKSETS) as at:
        ended = await at.play(odd("tools"), "full")
        limited = await at.play(odd("tools", agent={"max_turns": 2}), "turns")
    assert (ended.detail, ended.components) == ("", {"says_the_price": 0.0})
    assert (limited.detail, limited.components) == ("", {"says_the_price": 0.0})
    assert len(dialogues["turns"].requests) == 2


async def test_what_cannot_be_trained_fails_and_says_why() -> None:
    mistakes = {
        "TaskError": odd("raises"),
        "the taskset has no @vf.reward": odd("no_reward"),
        "marks role 'agent' as not trainable": odd("fixed"),
        "env.agent.retries is set": sums(agent={"retries": {"max_retries": 2}}),
        "role 'agent' plays more often than the 1 time(s) that have names": sums(id="best-of-n"),
        """2 roles of 'user-sim+verifiers_sums': set agent.roles = ["assistant", "user"]""": sums(id="user-sim"),
        "taskset 'verifiers_sumz' not found": sums(taskset={"id": "verifiers_sumz"}),
        "needs a container runtime": sums(agent={"harness": {"id": "codex"}}),
    }
    async with stage(SOLVE, "verifiers", calls={"k1": Dialogue(says("19"))}, environment=TASKSETS) as at:
        for told, row in mistakes.items():
            result = await at.play(row)
            assert (result.failure, result.reward) == ("raised", None)
            assert told in result.detail


async def test_a_refused_call_fails_the_episode_with_the_refusals_text() -> None:
    async with stage(SOLVE, "verifiers", calls={}, environment=TASKSETS) as at:
        result = await at.play(sums())
    assert result.failure == "raised"
    assert "no episode has this key" in result.detail


async def test_another_role_plays_with_a_model_of_its_own_and_is_not_trained() -> None:
    dialogues = {"k1": Dialogue(says("19")), "of-the-user": Dialogue(says("What is 12+7?", "###DONE###"))}
    environment = {**TASKSETS, "USER_KEY": "of-the-user"}
    async with stage(SOLVE, "verifiers", calls=dialogues, environment=environment) as at:
        client = {"type": "eval", "base_url": at.base_url, "api_key_var": "USER_KEY"}
        result = await at.play(sums(id="user-sim", user={"model": "org/tiny", "client": client}))
    assert result.components == {"right": 1.0, "a_number": 0.1}, result.detail
    assert [request.messages[-1]["content"] for request in dialogues["k1"].requests] == ["What is 12+7?"]
    assert len(dialogues["of-the-user"].requests) == 2


async def test_an_episode_past_its_deadline_ends_and_leaves_nothing_behind() -> None:
    stuck = asyncio.Event()

    class Silent(Dialogue):
        async def call(self, request: CallRequest) -> Any:
            self.requests.append(request)
            stuck.set()
            await asyncio.Event().wait()
            yield answer()

    dialogues = {"slow": Silent(says("19")), "k1": Dialogue(says("19"))}
    async with stage(SOLVE, "verifiers", calls=dialogues, environment=TASKSETS) as at:
        assert (await at.play(sums())).reward == pytest.approx(1.1)
        late = await at.play(sums(), "slow", deadline_s=3.0)
        assert (await at.play(sums())).reward == pytest.approx(1.1)
    assert stuck.is_set()
    assert late.failure == "deadline"
