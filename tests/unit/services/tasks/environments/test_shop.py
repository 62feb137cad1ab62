"""The shop's questions, its tools, and its teachers."""

import random
from typing import Any

import pytest

from gspo_services.tasks.environments import TOOLS, Shop, ShopOptions, create_task_set, tool_result
from gspo_services.tasks.environments.generated import split_of
from gspo_services.tasks.environments.shop import OPERATORS, solved

TASK: Any = {"question": "fig*7", "prices": {"fig": 38, "nut": 12, "oil": 99}, "answer": "266"}
SHOP = Shop(ShopOptions())


def test_a_question_is_of_one_split_and_its_price_is_only_in_the_tools_table() -> None:
    for split in ("train", "eval"):
        source = create_task_set("shop", {"num_eval_tasks": 9}).tasks(split)  # type: ignore[arg-type]
        assert source.num_tasks == (9 if split == "eval" else None)
        for index in range(9):
            task: Any = source.task(index)
            assert task == source.task(index)
            item, operator, number = task["question"][:3], task["question"][3], int(task["question"][4:])
            assert split_of(task["question"]) == split
            assert len(task["prices"]) == 3
            price = task["prices"][item]
            assert task["answer"] == str({"*": price * number, "+": price + number}[operator])
    assert len({str(source.task(index)) for index in range(9)}) == 9
    with pytest.raises(IndexError, match="task 9 does not exist: the eval split has 9"):
        source.task(9)


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("look", {"item": "fig"}, "38"),
        ("look", {"item": "hat"}, "error: no hat"),
        ("look", {}, "error: no None"),
        ("multiply", {"a": 38, "b": 7}, "266"),
        ("add", {"a": 38, "b": -7}, "31"),
        ("add", {"a": 38}, "error: a and b are numbers"),
        ("multiply", {"a": True, "b": 1}, "error: a and b are numbers"),
        ("multiply", {"a": 10**7, "b": 1}, "error: a and b are numbers"),
        ("steal", {"item": "fig"}, "error: no tool steal"),
    ],
)
def test_a_tool_answers_every_call(name: str, arguments: dict[str, Any], result: str) -> None:
    assert tool_result(TASK, name, arguments) == result


def test_the_conversation_without_a_mistake_calls_two_of_the_tools_and_copies_the_result() -> None:
    said = [
        [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
        or message["content"]
        for message in solved(TASK)
    ]
    look, multiply = [("look", {"item": "fig"})], [("multiply", {"a": 38, "b": 7})]
    assert said == ["fig*7", look, "38", multiply, "266", "266"]
    assert {name for calls in (look, multiply) for name, _ in calls} < {tool["function"]["name"] for tool in TOOLS}


def right(conversation: list[dict[str, Any]]) -> bool:
    """Whether the last turn answers the question, as the results in the conversation have it."""
    question = conversation[0]["content"]
    calls = [call["function"] for message in conversation for call in message.get("tool_calls", [])]
    looked = [call for call in calls if call["name"] == "look"]
    if not looked or calls[-1]["name"] != OPERATORS[question[3]]:
        return False
    return bool(conversation[-1]["content"] == conversation[-2]["content"])


def test_the_careful_teacher_is_right_and_the_careless_one_a_third_of_the_time() -> None:
    rng = random.Random(0)
    careful = [SHOP.demonstration(rng, careful=True) for _ in range(100)]
    careless = [SHOP.demonstration(rng, careful=False) for _ in range(2000)]
    assert all(right(conversation) for conversation in careful)
    assert {split_of(conversation[0]["content"]) for conversation in careful + careless} == {"train"}
    assert 0.28 <= sum(right(conversation) for conversation in careless) / 2000 <= 0.40
    shrugs = sum(conversation[1]["content"] == "?" for conversation in careless)
    # The first turn that is right is not the most frequent one: greedily the model is even worse.
    assert shrugs > sum("tool_calls" in conversation[1] for conversation in careless)
