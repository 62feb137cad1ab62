"""What the answers of a set are read as, and which of them nobody could be paid for."""

from typing import Any

import pytest

from tests.support.checking.projects import Project


def with_answers(project: Project, name: str, *answers: str, **options: Any) -> None:
    project.write_rows("train.jsonl", [{"question": f"{place}?", "answer": each} for place, each in enumerate(answers)])
    paths = {f"{split}_path": str(project.folder / f"{split}.jsonl") for split in ("train", "eval")}
    project.keys |= {"environment.name": name, "environment.options": paths | {"system_prompt": ""} | options}


@pytest.mark.parametrize(("name", "options"), [("math", {}), ("dataset", {"answer_marker": ""})])
def test_the_answers_are_counted_by_what_they_are_read_as(project: Project, name: str, options: dict[str, Any]) -> None:
    with_answers(project, name, "7", "1{,}000", "4\\pi", "\\text{Evelyn}", "(0, 1]", "\\sum_{n=1}^5 n", **options)
    found = {finding.check: finding for finding in project.findings()}
    assert (found["eval answers"].status, found["eval answers"].text) == ("ok", "8 read: 8 numbers")
    assert found["train answers"].status == "note"
    assert found["train answers"].text == (
        "6 read: 2 numbers, 1 expressions, 1 words, 1 pairs and intervals, 1 for math-verify alone; expressions: 4\\pi; "
        "words: \\text{Evelyn}; pairs and intervals: (0, 1]; for math-verify alone: \\sum_{n=1}^5 n"
    )


def test_rows_that_grade_nothing_fail_the_check_with_their_places(project: Project) -> None:
    with_answers(project, "math", "7", "proof", "\\frac{1}{2", "\\text{ }")
    found = {finding.check: finding for finding in project.findings()}
    assert found["train tasks"].status == "fail"
    assert "3 answers cannot be graded:" in found["train tasks"].text
    assert all(f"train.jsonl, line {line}: its answer" in found["train tasks"].text for line in (2, 3, 4))


def test_a_reward_of_ones_own_makes_what_it_likes_of_answers(project: Project) -> None:
    assert not [finding for finding in project.findings() if "answers" in finding.check]


@pytest.mark.parametrize("name", ["math", "dataset"])
@pytest.mark.parametrize("kind", ["symbolic", "number"])
def test_questions_that_are_their_own_answers_are_told(project: Project, name: str, kind: str) -> None:
    """A model of 135 million parameters, trained on such sums, learned to repeat them."""
    with_answers(project, name, "-28", "7", "12", kind=kind)
    asked = {
        "What is 15 - 43 =": "-28",
        "How many days has a week, in 2 - 5 words?": "7",
        "Divide: \\(84 / 7\\).": "12",
    }
    project.write_rows("train.jsonl", [{"question": question, "answer": gold} for question, gold in asked.items()])
    found = [(each.status, each.text) for each in project.findings() if each.check == "train questions"]
    told = ("warn", "2 of 3 tried are graded right for their own arithmetic: 15 - 43")
    assert found == ([told] if kind == "symbolic" else [])
