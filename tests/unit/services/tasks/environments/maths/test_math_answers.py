"""Where an answer stands, and what it is worth in real reward workers, with `math` and with `dataset`."""

import time
from typing import Any

import pytest

from gspo.tasks.environments import RewardJob
from gspo_services.tasks.environments import RewardPool, RewardPoolOptions, create_environment
from gspo_services.tasks.environments.maths.final_answer import AnswerForm, last_boxed, said_answer, stated_answer
from gspo_services.tasks.environments.reward_results import RewardResult


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
    ("text", "marker", "answer"),
    [
        ("3 #### 4 #### 5", "####", "5"),
        ("so\n#### 5 apples\nBye.", "####", "5 apples"),
        ("#### $\\boxed{5}$", "####", "5"),
        ("\\boxed{6} #### ", "####", None),
        ("It is $\\boxed{5}$, or 6.", "####", "5"),
        ("It is $\\boxed{5}$, or 6.", "", "5"),
        ("4\\pi", "", "4\\pi"),
        ("First 3.\nThe profit is $70,000.", "####", "$70,000."),
        ("so 5", "####", "5"),
        ("Hence $x^2$ it is.", "", "x^2"),
        ("The answer is 5 or 6", "", "The answer is 5 or 6"),
        ("She has 5 or 6", "", "She has 5 or 6"),
        ("There are 5 and it costs 6", "", "5 and it costs 6"),
        ("It is not 5", "", "not 5"),
        ("She pays 5cm, no more", "", "5"),
        ("Plants live on CO2, no more", "", "Plants live on CO2, no more"),
        ("The ratio is 3:4.", "", "3:4."),
        ("Result: 5", "", "Result: 5"),
        ("The winner is Evelyn.", "", "Evelyn."),
        ("Maybe 5", "", "5"),
        ("maybe 5", "", "maybe 5"),
        ("from 5 to 6", "", "from 5 to 6"),
        ("no idea", "####", "no idea"),
        ("", "####", None),
        ("\\boxed{" + "1" * 3000 + "}", "", None),
    ],
)
def test_what_a_text_says_without_a_form(text: str, marker: str, answer: str | None) -> None:
    assert said_answer(text, marker) == answer


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
        ("\\sum_{n=1}^{5} n^2", "\\sum_{k=1}^{5} k^2", "right"),
    ]
    async with RewardPool(RewardPoolOptions(num_workers=1)) as pool:
        for gold, answer, ending in pairs:
            result = await graded(pool, gold, f"\\boxed{{{answer}}}", cpu_s=30)
            assert result.failure is None, result
            assert [name for name, value in result.components.items() if value] == ([ending] if ending else []), answer
            assert result.reward == float(ending == "right")
        # An answer that takes for ever is the policy's doing, and named.
        result = await graded(pool, "\\sum_{n=1}^{5} n^2", "\\boxed{\\sum_{n=1}^{99999999} n^{n}}", cpu_s=0.5)
        assert (result.reward, result.failure, result.components["too_slow"]) == (0.0, None, 1.0)
        result = await graded(pool, "2", "It is 2.")
        assert (result.reward, result.components["no_answer"]) == (0.0, 1.0)
        # An answer of the data set that cannot be read is not.
        result = await graded(pool, "\\text{}", "\\boxed{1}", cpu_s=30)
        assert (result.reward, result.failure) == (None, "raised")
        assert "a.jsonl, line 3: its answer" in result.detail


GOLDS = (
    "4\\pi", "2\\sqrt{3}", "3x+4y+14=0", "(-\\infty,-2)\\cup(2,\\infty)", "\\text{Evelyn}", "(1,-2)", "6-5i", "x^2+1",
    "2^{10}",
)  # fmt: skip


@pytest.mark.parametrize("name", ["dataset", "math"])
async def test_golds_without_dollars_are_read_whole(name: str) -> None:
    """What the row's own text says in a box is right, and no number in it."""
    options: dict[str, Any] = {"answer_marker": "", "system_prompt": ""} if name == "dataset" else {}
    environment = create_environment(name, options)

    async def worth(pool: RewardPool, gold: str, action: str) -> float | None:
        task: dict[str, Any] = {"prompt": "P", "answer": gold, "place": "a.jsonl, line 3"}
        job = environment.step(environment.start(task, 0).state, action).reward
        assert isinstance(job, RewardJob)
        return (await pool.grade(job.for_task(task))).reward

    async with RewardPool(RewardPoolOptions(num_workers=1)) as pool:
        assert [await worth(pool, gold, f"It is $\\boxed{{{gold}}}$.") for gold in GOLDS] == [1.0] * len(GOLDS)
        wrong = [(0, "It is 4"), (0, "\\boxed{4}"), (2, "x=0"), (2, "\\boxed{0}"), (6, "It is 5"), (5, "\\boxed{1}")]
        assert [await worth(pool, GOLDS[place], said) for place, said in wrong] == [0.0] * len(wrong)


async def test_integers_are_compared_as_such() -> None:
    async with RewardPool(RewardPoolOptions(num_workers=1)) as pool:
        for said, reward in (("33", 1.0), ("33\\%", 0.0)):
            result = await graded(pool, "033", f"\\boxed{{{said}}}", kind="integer")
            assert (result.reward, result.components["right"]) == (reward, reward)


def test_votes_are_in_one_spelling_and_known_to_be_the_same() -> None:
    for environment in (create_environment("math", {}), create_environment("dataset", {"answer_marker": ""})):
        said = [
            environment.answer({}, f"so \\boxed{{{each}}}") for each in ("7.", "\\frac{14}{2}", "x + 1", "1+x", "\\text{}")
        ]
        assert said == ["7", "7", "x+1", "1+x", None]
        assert environment.is_same_answer({}, "x+1", "1+x")
        assert not environment.is_same_answer({}, "x+1", "x")
