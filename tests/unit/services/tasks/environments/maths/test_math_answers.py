"""Where an answer stands, and what it is worth; symbolic ones in real reward workers."""

import time
from typing import Any

import pytest

from gspo.tasks.environments import RewardJob
from gspo_services.tasks.environments import RewardPool, RewardPoolOptions, create_environment
from gspo_services.tasks.environments.maths.answers import AnswerForm, last_boxed, stated_answer
from gspo_services.tasks.environments.reward_results import RewardResult
from gspo_services.tasks.reward_worker.math_answers import integer_answer, integer_in


@pytest.mark.parametrize(
    ("text", "form", "answer"),
    [
        ("So \\boxed{7}.", "boxed", "7"),
        ("\\boxed{1}, no: \\boxed{ \\frac{1}{2} }", "boxed", "\\frac{1}{2}"),
        ("\\boxed{\\{1, 2\\}}", "boxed", "\\{1, 2\\}"),
        ("\\fbox {3}", "boxed", "3"),
        ("\\boxed{1} and then \\boxed{2", "boxed", "1"),
        ("Answer: 7", "boxed", None),
        ("\\boxed{}", "boxed", None),
        ("\\boxed{" + "1" * 3000 + "}", "boxed", None),
        ("Answer: 1\nAnswer: **$12$.**\nBye.", "marked", "12"),
        ("Answer: \\boxed{5}", "marked", "5"),
        ("\\boxed{7}", "marked", None),
        ("\\boxed{7}\nAnswer: 8", "either", "7"),
        ("Answer: 8", "either", "8"),
        ("8", "either", None),
    ],
)
def test_the_stated_answer(text: str, form: AnswerForm, answer: str | None) -> None:
    assert stated_answer(text, form, "Answer:") == answer


def test_a_hostile_text_is_read_in_no_time() -> None:
    """Each of many boxes is left open: reading on for each would take some ten seconds."""
    begin = time.process_time()
    assert last_boxed("\\boxed{" * 20_000) is None
    assert time.process_time() - begin < 2


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("042", 42), ("0", 0), ("-7", -7), ("+7", 7), ("1,000", 1000), ("1{,}000", 1000), ("$ 7 $", 7), ("7.0", 7), ("7.",
        7), ("7.5", None), ("1,00", None), ("x", None), ("", None), ("7 8", 78), ("1" * 2000, None),
    ],
)  # fmt: skip
def test_integers_however_they_are_written(text: str, number: int | None) -> None:
    assert integer_in(text) == number


def test_an_integer_is_right_wrong_or_none() -> None:
    def ending(answer: str | None) -> list[str]:
        return [name for name, value in integer_answer("033", answer).items() if value]

    assert [ending("33"), ending("34"), ending("x"), ending(None)] == [["right"], [], ["unreadable"], ["no_answer"]]
    with pytest.raises(ValueError, match="the data set's answer 'x' is not an integer"):
        integer_answer("x", "1")


async def graded(pool: RewardPool, gold: str, action: str, **options: Any) -> RewardResult:
    environment = create_environment("math", options)
    task: dict[str, Any] = {"prompt": "P", "answer": gold, "place": "a.jsonl, line 3"}
    job = environment.step(environment.start(task, 0).state, action).reward
    assert isinstance(job, RewardJob)
    return await pool.grade(job.for_task(task))


async def test_expressions_are_compared_by_what_they_mean() -> None:
    pairs = [
        ("\\frac{1}{2}", "0.5", "right"),
        ("x^2 + 2x + 1", "(x+1)^2", "right"),
        ("(1, 2)", "(2, 1)", ""),
        ("\\sqrt{8}", "2\\sqrt{2}", "right"),
        ("204", "\\text{}", "unreadable"),
    ]
    async with RewardPool(RewardPoolOptions(num_workers=1)) as pool:
        for gold, answer, ending in pairs:
            result = await graded(pool, gold, f"\\boxed{{{answer}}}", cpu_s=30)
            assert result.failure is None, result
            assert [name for name, value in result.components.items() if value] == ([ending] if ending else []), answer
            assert result.reward == float(ending == "right")
        # An answer that takes for ever is the policy's doing, and named.
        result = await graded(pool, "x^2 + 3", "\\boxed{(x+y+z+w)^{60}}", cpu_s=0.5)
        assert (result.reward, result.failure, result.components["too_slow"]) == (0.0, None, 1.0)
        result = await graded(pool, "2", "It is 2.")
        assert (result.reward, result.components["no_answer"]) == (0.0, 1.0)
        # An answer of the data set that cannot be read is not.
        result = await graded(pool, "\\text{}", "\\boxed{1}", cpu_s=30)
        assert (result.reward, result.failure) == (None, "raised")
        assert "a.jsonl, line 3: the data set's answer" in result.detail


async def test_integers_need_no_symbolic_algebra() -> None:
    async with RewardPool(RewardPoolOptions(num_workers=1)) as pool:
        result = await graded(pool, "033", "\\boxed{33}", kind="integer")
        assert (result.reward, result.components["right"]) == (1.0, 1.0)
