"""Problems of a small part of Python, for a tiny model: "sum, times 3, minus 2" of two numbers.

A program reads two numbers, combines them, changes the result step by step and prints it. Two steps make some four thousand
problems, of which one in five is held out.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

from gspo.tasks.environments import DemonstrationMessage, Split
from gspo_services.tasks.environments import draw_problem

READS: Final = "a,b=map(int,input().split())\n"
OPENS, CLOSES, PRINTS = "```\n", "```", "print(c)\n"
PROGRAM_PIECES: Final = (READS, OPENS, PRINTS)
"""What every program has: single tokens, so that an answer has some 25 tokens and not 65."""

COMBINED: Final = MappingProxyType(
    {
        "sum": "a+b",
        "difference": "a-b",
        "product": "a*b",
        "larger": "max(a,b)",
        "smaller": "min(a,b)",
        "distance": "abs(a-b)",
    }
)
NUM_STEPS: Final = 2
NUM_TESTS: Final = 4

ProgramHabit = Literal["right", "hurry", "mix-up", "no fence", "spin"]
CARELESS_HABITS: Final[dict[ProgramHabit, float]] = {
    "right": 0.15,
    "hurry": 0.65,
    "mix-up": 0.11,
    "no fence": 0.08,
    "spin": 0.01,
}
"""How often the careless teacher has which habit. The most frequent one forgets the last step, so a model that imitates it
and decodes greedily does: reinforcement has to find out which habit passes the tests."""


def draw_small_problem(rng: random.Random) -> str:
    """A problem of either split."""
    return ", ".join([rng.choice(list(COMBINED)), *(_step(rng) for _ in range(NUM_STEPS))])


def right_program(problem: str) -> str:
    """The program that solves ``problem``."""
    return READS + "".join(f"c={line}\n" for line in _lines(problem)) + PRINTS


def right_answer(problem: str) -> str:
    """The careful teacher's answer."""
    return OPENS + right_program(problem) + CLOSES


def small_demonstration(rng: random.Random, *, careful: bool) -> list[DemonstrationMessage]:
    """A training problem with the right answer, or with the careless teacher's."""
    problem = draw_problem(draw_small_problem, "train", rng)
    habit: ProgramHabit = (
        "right" if careful else rng.choices(list(CARELESS_HABITS), weights=list(CARELESS_HABITS.values()))[0]
    )
    return [
        DemonstrationMessage("user", problem, train=False),
        DemonstrationMessage("assistant", _answer(problem, habit, rng), train=True),
    ]


def write_small_problems(folder: Path, num_train: int = 2_000, num_eval: int = 128) -> None:
    """Write train.jsonl and eval.jsonl, rows of the environment ``code``; no problem is in both, and none twice."""
    folder.mkdir(parents=True, exist_ok=True)
    splits: tuple[tuple[Split, int], ...] = (("train", num_train), ("eval", num_eval))
    for split, number in splits:
        rows = map(json.dumps, small_problems(split, number))
        (folder / f"{split}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")


def small_problems(split: Split, number: int) -> list[dict[str, object]]:
    """Rows of the environment ``code``, always the same; none is there twice, or in the other split."""
    rng = random.Random(f"small programs, {split}")
    problems: dict[str, None] = {}
    while len(problems) < number:
        problems.setdefault(draw_problem(draw_small_problem, split, rng))
    return [_row(problem, rng) for problem in problems]


def _row(problem: str, rng: random.Random) -> dict[str, object]:
    pairs = [(rng.randint(-9, 9), rng.randint(10, 29)) for _ in range(NUM_TESTS)]
    # In both orders, so that larger and smaller are told apart from a and b.
    inputs = [pair if number % 2 else pair[::-1] for number, pair in enumerate(pairs)]
    tests = [{"input": f"{a} {b}\n", "output": f"{_result(problem, a, b)}\n"} for a, b in inputs]
    return {"prompt": problem, "tests": tests, "solution": right_program(problem)}


def _result(problem: str, a: int, b: int) -> int:
    kind, *steps = problem.split(", ")
    combined: dict[str, Callable[[], int]] = {
        "sum": lambda: a + b, "difference": lambda: a - b, "product": lambda: a * b,
        "larger": lambda: max(a, b), "smaller": lambda: min(a, b), "distance": lambda: abs(a - b),
    }  # fmt: skip
    value = combined[kind]()
    for step in steps:
        word, _, number = step.partition(" ")
        match word:
            case "plus":
                value += int(number)
            case "minus":
                value -= int(number)
            case "times":
                value *= int(number)
            case "squared":
                value *= value
            case _:
                value = -value
    return value


def _step(rng: random.Random) -> str:
    word = rng.choice(["plus", "minus", "times", "plus", "minus", "times", "squared", "negated"])
    return word if word in ("squared", "negated") else f"{word} {rng.randint(2, 9)}"


def _lines(problem: str) -> list[str]:
    kind, *steps = problem.split(", ")
    signs = {"plus": "+", "minus": "-", "times": "*"}
    lines = [COMBINED[kind]]
    for step in steps:
        word, _, number = step.partition(" ")
        lines.append(f"c{signs[word]}{number}" if number else "c*c" if word == "squared" else "-c")
    return lines


def _answer(problem: str, habit: ProgramHabit, rng: random.Random) -> str:
    parts: Sequence[str] = problem.split(", ")
    match habit:
        case "right":
            return right_answer(problem)
        case "hurry":
            return right_answer(", ".join(parts[:-1]))
        case "mix-up":
            other = rng.choice([kind for kind in COMBINED if kind != parts[0]])
            return right_answer(", ".join([other, *parts[1:]]))
        case "no fence":
            return right_program(problem)
        case "spin":
            return f"{OPENS}{READS}while 1:a\n{CLOSES}"
