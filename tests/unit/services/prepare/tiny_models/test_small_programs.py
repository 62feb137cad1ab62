"""The small programs of the demo: problems, the two teachers, and the rows of the environment ``code``."""

import io
import json
import random
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from gspo_services.prepare.tiny_models.small_programs import (
    CARELESS_HABITS,
    PROGRAM_PIECES,
    draw_small_problem,
    right_answer,
    right_program,
    small_demonstration,
    write_small_problems,
)
from gspo_services.prepare.tiny_models.tiny import PROGRAMS, make_tiny_model
from gspo_services.prepare.tiny_models.tokenizer import build_tokenizer
from gspo_services.tasks.environments import create_environment
from gspo_services.tasks.environments.generated import split_of
from gspo_services.tasks.environments.programs import TOOLCHAINS, program_in


def printed(program: str, given: str) -> str:
    """What one of our own programs prints; nothing of a model runs here."""
    output = io.StringIO()
    with redirect_stdout(output), patch("builtins.input", lambda: given.strip()):
        exec(program, {})
    return output.getvalue()


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_problem_and_its_program() -> None:
    assert right_program("larger, times 3, negated") == ("a,b=map(int,input().split())\nc=max(a,b)\nc=c*3\nc=-c\nprint(c)\n")
    assert printed(right_program("larger, times 3, negated"), "4 7") == "-21\n"


def test_the_rows_tests_are_what_the_right_programs_print(tmp_path: Path) -> None:
    """Expected outputs are computed in another way than by the programs."""
    write_small_problems(tmp_path, num_train=300, num_eval=50)
    for split, number in (("train", 300), ("eval", 50)):
        rows = rows_of(tmp_path / f"{split}.jsonl")
        assert len({row["prompt"] for row in rows}) == number
        assert {split_of(row["prompt"]) for row in rows} == {split}
        for row in rows:
            outputs = [printed(row["solution"], test["input"]) for test in row["tests"]]
            assert outputs == [test["output"] for test in row["tests"]]


def test_the_rows_are_tasks_of_the_environment_code(tmp_path: Path) -> None:
    write_small_problems(tmp_path, num_train=3, num_eval=2)
    paths = {f"{split}_path": str(tmp_path / f"{split}.jsonl") for split in ("train", "eval")}
    environment = create_environment("code", paths)
    assert (environment.tasks("train").num_tasks, environment.tasks("eval").num_tasks) == (3, 2)


@pytest.mark.parametrize("other", ["hurry", "mix-up"])
def test_a_careless_habit_fails_the_tests_of_nearly_every_problem(other: str, tmp_path: Path) -> None:
    write_small_problems(tmp_path, num_train=2, num_eval=200)
    failed = 0
    for row in rows_of(tmp_path / "eval.jsonl"):
        kind, *steps = row["prompt"].split(", ")
        wrong = ", ".join([kind, *steps[:-1]] if other == "hurry" else ["smaller" if kind == "larger" else "larger", *steps])
        failed += any(printed(right_program(wrong), test["input"]) != test["output"] for test in row["tests"])
    assert failed >= 196


def test_the_careless_teacher_is_right_in_one_case_of_seven() -> None:
    rng = random.Random(0)
    answers = [small_demonstration(rng, careful=False) for _ in range(2000)]
    counted = Counter(answer.content == right_answer(question.content) for question, answer in answers)
    assert counted[True] / 2000 == pytest.approx(CARELESS_HABITS["right"], abs=0.03)
    assert all(split_of(question.content) == "train" for question, _ in answers)
    careful = [small_demonstration(rng, careful=True) for _ in range(200)]
    assert all(answer.content == right_answer(question.content) for question, answer in careful)


def test_what_every_program_has_is_one_token_each() -> None:
    tokenizer = build_tokenizer(pieces=PROGRAM_PIECES)
    answer = right_answer("sum, plus 2, squared")
    ids = tokenizer.encode(answer, add_special_tokens=False)
    assert tokenizer.decode(ids) == answer
    assert len(ids) == 3 + len("c=a+b\nc=c+2\nc=c*c\n") + len("```")
    program = program_in(answer, TOOLCHAINS)
    assert program is not None
    assert program.source == right_program("sum, plus 2, squared")


def test_a_model_of_programs_has_its_tasks_beside_it(tmp_path: Path) -> None:
    report = make_tiny_model(tmp_path / "model", programs=True, num_steps=2, num_eval_episodes=2, progress=lambda _: None)
    assert list(report.sampled_rewards) == [PROGRAMS]
    assert len(rows_of(tmp_path / "model" / "tasks" / "train.jsonl")) == 2000
    assert len(rows_of(tmp_path / "model" / "tasks" / "eval.jsonl")) == 128
    problem = draw_small_problem(random.Random(1))
    assert problem == draw_small_problem(random.Random(1))
