"""A server of OpenEnv, played by the integration."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from gspo_services.rollout.endpoint import CallAnswer, CallDelta, CallRequest
from tests.frameworks.guessing import GuessServer, guess_server, number_of, stoppable_server
from tests.frameworks.played import Dialogue, roles, says, stage
from tests.support.scripted_episodes import answer

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(1200)]

Then = Callable[[], Coroutine[Any, Any, None]]

SOLVE = "gspo.tasks.integrations.openenv:solve"


def task(url: str, seed: int = 0, **options: Any) -> dict[str, Any]:
    return {"openenv": {"url": url, "observation_field": "text", **options}, "reset": {"seed": seed}}


def searcher(request: CallRequest) -> CallAnswer:
    """Begins in the middle and follows what it is told."""
    low, high = 0, 9
    guess = 5
    for message in request.messages:
        if message["role"] == "user" and message["content"] != "guess":
            low, high = (guess + 1, high) if message["content"] == "more" else (low, guess - 1)
            guess = (low + high) // 2
    return answer(str(guess))


EARNED = {5: 1.0, 2: 0.875, 7: 0.875, 0: 0.75, 3: 0.75, 6: 0.75, 8: 0.75, 1: -0.375, 4: -0.375, 9: -0.375}
"""What ``searcher`` earns, by the number that it searches."""
LONG = next(seed for seed in range(100) if number_of(seed) == 0)
"""A seed whose number ``searcher`` finds in three turns."""


async def test_the_rewards_of_all_turns_are_added() -> None:
    dialogues = {f"k{seed}": Dialogue(searcher) for seed in range(8)}
    async with guess_server(8) as url, stage(SOLVE, "agents", calls=dialogues) as at:
        results = await asyncio.gather(*(at.play(task(url, seed), f"k{seed}") for seed in range(8)))
    assert [result.detail for result in results] == [""] * 8
    assert [result.reward for result in results] == [EARNED[number_of(seed)] for seed in range(8)]
    longest = max((dialogue.requests for dialogue in dialogues.values()), key=len)
    assert [roles(request) for request in longest] == [["user", *["assistant", "user"] * turn] for turn in range(3)]


async def test_episodes_wait_for_a_place_in_a_server_that_is_full() -> None:
    dialogues = {f"k{number}": Dialogue(says(str(number_of(3)))) for number in range(3)}
    async with guess_server(1) as url, stage(SOLVE, "agents", calls=dialogues) as at:
        results = await asyncio.gather(*(at.play(task(url, 3), key) for key in dialogues))
    assert [(result.reward, result.detail) for result in results] == [(1.0, "")] * 3


async def test_an_action_may_be_a_field_an_object_or_something_else() -> None:
    right = number_of(5)
    answers = {
        "field": (says(str(right)), {"action_field": "number"}, 1.0),
        "json": (says(json.dumps({"number": right})), {}, 1.0),
        "fenced": (says(f'```json\n{{"number": {right}}}\n```'), {}, 1.0),
        "words": (says("I do not know"), {}, 0.0),
        "list": (says("[1, 2]"), {}, 0.0),
        "other": (says('{"letter": "a"}'), {}, 0.0),
        "late": (says(str((right + 1) % 10), "who knows"), {}, -0.125),
        "short": (says(str((right + 1) % 10)), {"max_turns": 2}, -0.25),
    }
    dialogues = {name: Dialogue(reply) for name, (reply, _, _) in answers.items()}
    async with guess_server(8) as url, stage(SOLVE, "agents", calls=dialogues) as at:
        played = {name: await at.play(task(url, 5, **options), name) for name, (_, options, _) in answers.items()}
    assert {name: (result.reward, result.detail) for name, result in played.items()} == {
        name: (reward, "") for name, (_, _, reward) in answers.items()
    }
    assert len(dialogues["short"].requests) == 2


class Stopping(Dialogue):
    """Ends the server at each of these calls of the policy, and begins what comes then before it answers."""

    def __init__(self, server: GuessServer, at_calls: set[int], tasks: asyncio.TaskGroup, then: Then) -> None:
        super().__init__(searcher)
        self._server = server
        self._at_calls = at_calls
        self._tasks = tasks
        self._then = then

    async def call(self, request: CallRequest) -> AsyncGenerator[CallDelta | CallAnswer, None]:
        if len(self.requests) + 1 in self._at_calls:
            await self._server.stop()
            self._tasks.create_task(self._then())
        async for part in super().call(request):
            yield part


async def test_a_server_that_is_started_again_amid_an_episode_is_waited_for_and_nobody_notices(tmp_path: Path) -> None:
    printed = tmp_path / "agents.log"
    async with stoppable_server(8) as server, asyncio.TaskGroup() as tasks:

        async def back() -> None:
            await server.turn_away(2)
            await server.start()

        await server.start()
        dialogue = Stopping(server, {1, 2, 3}, tasks, back)
        async with stage(SOLVE, "agents", calls={"k1": dialogue}, output=printed) as at:
            result = await at.play(task(server.url, LONG))
            await server.stop()
    assert (result.detail, result.reward) == ("", EARNED[number_of(LONG)])
    assert [message["content"] for message in dialogue.requests[-1].messages] == ["guess", "5", "less", "2", "less"]
    said = printed.read_text(encoding="utf-8")
    assert said.count(f"the server at {server.url} is away") == said.count("is there again") == 3


async def test_a_server_whose_tasks_are_others_after_a_restart_fails_the_episode() -> None:
    seed = next(seed for seed in range(100) if number_of(seed) == 7)
    async with stoppable_server(8) as server, asyncio.TaskGroup() as tasks:
        await server.start()
        dialogue = Stopping(server, {2}, tasks, lambda: server.start(added=4))
        async with stage(SOLVE, "agents", calls={"k1": dialogue}) as at:
            result = await at.play(task(server.url, seed))
            await server.stop()
    assert (result.failure, result.reward) == ("raised", None)
    for words in ("does not come out the same: its answer to action 1 ({'number': 5})", "'more'", "is now", "'less'"):
        assert words in result.detail, result.detail


@pytest.mark.parametrize("options", [{}, {"action_field": "number"}], ids=["schema", "entering"])
async def test_a_server_that_is_away_at_first_is_waited_for(options: dict[str, str]) -> None:
    async with stoppable_server(1) as server, asyncio.TaskGroup() as tasks:
        away = tasks.create_task(server.turn_away(3))
        await server.known.wait()
        async with stage(SOLVE, "agents", calls={"k1": Dialogue(says(str(number_of(3))))}) as at:
            played = tasks.create_task(at.play(task(server.url, 3, **options)))
            await away
            await server.start()
            result = await played
            await server.stop()
    assert (result.detail, result.reward) == ("", 1.0)


@pytest.mark.parametrize(("patience_s", "deadline_s"), [(0.5, 60.0), (300.0, 8.0)], ids=["patience", "deadline"])
async def test_a_server_that_stays_away_is_named_before_the_deadline(patience_s: float, deadline_s: float) -> None:
    async with stoppable_server(8) as server, asyncio.TaskGroup() as tasks:
        await server.start()
        dialogue = Stopping(server, {2}, tasks, nothing)
        async with stage(SOLVE, "agents", calls={"k1": dialogue}) as at:
            result = await at.play(task(server.url, patience_s=patience_s), deadline_s=deadline_s)
    assert (result.failure, f"the server at {server.url} has been away for" in result.detail) == ("raised", True), result


async def nothing() -> None:
    pass


async def test_more_arguments_of_the_reset_reach_the_server() -> None:
    dialogue = Dialogue(says("99"))
    async with guess_server(1) as url, stage(SOLVE, "agents", calls={"k1": dialogue}) as at:
        row = task(url, 3)
        assert (await at.play({**row, "reset": {"seed": 3, "shown": True}})).detail == ""
    assert dialogue.requests[0].messages[0]["content"] == f"guess {number_of(3)}"


async def test_what_is_wrong_with_a_task_is_said() -> None:
    async with guess_server(2) as url, stage(SOLVE, "agents", calls={"k1": Dialogue(says("1"))}) as at:
        no_field = await at.play(task(url, observation_field="image"))
        no_option = await at.play(task(url, max_steps=3))
        no_server = await at.play(task("http://127.0.0.1:9", action_field="number", patience_s=0))
    assert 'no field "image": it has' in no_field.detail
    assert "max_steps" in no_option.detail
    assert "the server at http://127.0.0.1:9 has been away for 0.0 s; patience_s is 0" in no_server.detail
    assert {no_field.failure, no_option.failure, no_server.failure} == {"raised"}
