"""A server of OpenEnv, played by the integration."""

import asyncio
import json
from typing import Any

import pytest

from gspo_services.rollout.endpoint import CallAnswer, CallRequest
from tests.frameworks.guessing import guess_server, number_of
from tests.frameworks.played import Dialogue, roles, says, stage
from tests.support.scripted_episodes import answer

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(1200)]

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


async def test_what_is_wrong_with_a_task_is_said() -> None:
    async with guess_server(2) as url, stage(SOLVE, "agents", calls={"k1": Dialogue(says("1"))}) as at:
        no_field = await at.play(task(url, observation_field="image"))
        no_option = await at.play(task(url, max_steps=3))
        no_server = await at.play(task("http://127.0.0.1:9", action_field="number"))
    assert 'no field "image": it has' in no_field.detail
    assert "max_steps" in no_option.detail
    assert "Failed to connect to ws://127.0.0.1:9/ws" in no_server.detail
    assert {no_field.failure, no_option.failure, no_server.failure} == {"raised"}
