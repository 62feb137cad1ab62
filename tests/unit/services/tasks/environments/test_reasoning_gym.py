"""The environment ``reasoning_gym`` as far as a rollout sees it, which needs nothing of the package."""

import importlib.util
import os
import re
from contextlib import suppress
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from gspo.tasks.environments import RewardJob
from gspo.tasks.ladders import Rung
from gspo_services.tasks.environments import create_environment
from gspo_services.tasks.environments.gym.environment import stated_answer
from gspo_services.tasks.environments.gym.options import SYSTEM_PROMPT, ReasoningGymOptions
from gspo_services.tasks.environments.gym.tasks import GymSource
from gspo_services.tasks.gym import Generator, GymRefused, GymUndrawn, Library, gym_library

TASK = {"generator": "chain_sum", "level": 0, "parameters": "{}", "question": "3 + 4 =", "answer": "7", "entry": "{}"}


def environment(**options: Any) -> Any:
    return create_environment("reasoning_gym", options)


@pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is not None, reason="the package is installed here")
def test_a_missing_package_is_named_with_the_command_that_installs_it() -> None:
    try:
        with pytest.raises(
            ValueError, match=r"reasoning-gym is not installed here: pip install 'reasoning-gym>=0\.1\.25,<0\.2'"
        ):
            environment().tasks("train")
    finally:
        gym_library().close()


def test_its_process_leaves_no_file_open() -> None:
    library, before = Library(), os.listdir("/proc/self/fd")
    for _ in range(2):
        with suppress(GymRefused):
            library.version()
        library.close()
    assert len(os.listdir("/proc/self/fd")) == len(before)


class SlowLibrary(Library):
    """Draws no task whose number is even, as if it took too long, and none of 1 modulo 4, as if that made no sense."""

    def version(self) -> str:
        return "0"

    def levels(self, generator: Generator) -> list[int]:
        return [0, 2]

    def draw(self, generator: Generator, level: int | None, number: int) -> dict[str, str]:
        if number % 4 != 3:
            raise GymRefused("it makes no sense") if number % 2 else GymUndrawn("it took too long")
        return {"question": f"{level} {number}", "answer": "7", "entry": "{}"}


def test_a_task_that_is_not_drawn_here_is_named_and_its_place_is_taken() -> None:
    source = GymSource(ReasoningGymOptions(generators="chain_sum"), SlowLibrary())
    drawn = []
    with structlog.testing.capture_logs() as logs:
        for index in range(40):
            with suppress(GymRefused):
                drawn.append(source.draw("train", Rung(0, 1), index))
    assert all(task["question"] == f"2 {task['number']}" for task in drawn)
    assert len(drawn) > 20
    said = [line for line in logs if line["event"] == "task_replaced"]
    assert said
    assert all(line["number"] % 2 == 0 and line["reason"] == "it took too long" for line in said)
    assert said[0] | {"split": "train", "generator": "chain_sum", "level": 2, "log_level": "warning"} == said[0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"generators": []}, "generators is empty"),
        ({"generators": 7}, "generators"),
        ({"generators": [{"nam": "chain_sum"}]}, "nam"),
        ({"generators": [{"name": "chain_sum", "weight": 0}]}, "weight"),
        ({"generators": [{"name": "chain_sum", "weight": float("nan")}]}, "`float` > 0.0 - at `$.generators[0].weight`"),
        ({"curriculum": {"raise_at": 1.5}}, "raise_at"),
        ({"curriculum": {"first": 1}}, "first"),
        ({"answer_form": "boxed"}, "answer_form"),
        ({"generator": "chain_sum"}, "has no option generator: its options are generators, curriculum"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        environment(**options).tasks("train")


def test_the_question_is_asked_with_the_packages_own_instructions() -> None:
    start = environment().start(TASK, 0)
    assert start.messages == [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": "3 + 4 ="}]
    assert environment(system_prompt="").start(TASK, 0).messages == [{"role": "user", "content": "3 + 4 ="}]


def test_an_answer_is_scored_with_its_task_and_outlives_its_own_limits() -> None:
    step = environment(cpu_s=20.0).step({}, "so <answer> 7 </answer>")
    assert isinstance(step.reward, RewardJob)
    assert (step.done, step.messages) == (True, [])
    assert step.reward.for_task(TASK).arguments == {"answer": "7", "cpu_s": 20.0, "task": TASK}
    assert step.reward.deadline_s == 240.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>7</answer>", "7"),
        ("<answer>1</answer> no, <answer> 7\n</answer> good", "7"),
        ("<answer>a <answer>b</answer> c</answer>", "a <answer>b"),
        ("<answer></answer>", ""),
        ("<answer>7", None),
        ("7</answer>", None),
        ("", None),
    ],
)
def test_a_tagged_answer_is_the_last_one(text: str, answer: str | None) -> None:
    assert stated_answer(text, "tagged") == answer


@given(st.lists(st.sampled_from(["<answer>", "</answer>", " ", "\n", "7", "<", "answer>"]), max_size=12))
def test_it_is_found_as_the_packages_own_expression_finds_it(parts: list[str]) -> None:
    text = "".join(parts)
    matches = list(re.finditer(r"<answer>\s?(.*?)\s?</answer>", text, flags=re.DOTALL))
    assert stated_answer(text, "tagged") == (matches[-1].group(1).strip() if matches else None)


def test_a_text_of_open_tags_takes_no_time() -> None:
    assert stated_answer("<answer>" * 200_000, "tagged") is None


def test_whole_answers_and_votes() -> None:
    whole = environment(answer_form="whole")
    assert whole.step({}, " 7 ").reward.arguments["answer"] == "7"
    assert whole.step({}, " ").reward.arguments["answer"] is None
    assert [environment().answer(TASK, text) for text in ("<answer>a  b\n c</answer>", "<answer> </answer>", "a")] == [
        "a b c", None, None,
    ]  # fmt: skip
