"""All generators of reasoning-gym through the real process and the real reward function, beside the package itself."""

from __future__ import annotations

import importlib
import json
import os
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from gspo_protocol.limits import MAX_TASK_BYTES
from gspo_protocol.messages.base import require_plain
from gspo_services.tasks.environments import create_environment
from gspo_services.tasks.environments.gym.environment import stated_answer
from gspo_services.tasks.environments.gym.options import SYSTEM_PROMPT, UNSOUND
from gspo_services.tasks.gym import Generator, GymRefused, Library, gym_library

pytestmark = [
    pytest.mark.parity,
    pytest.mark.timeout(900),
    # The package leaves files of its data open.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
pytest.importorskip("reasoning_gym")

package = importlib.import_module("gspo_services.tasks.gym.library")
score = importlib.import_module("gspo_services.tasks.gym.scoring").score
NAMES = package.generator_names()
NUMBERS = (3, 2**31 - 1)
GARBAGE = "no idea ((("
CPU_S = 30.0
SOLUTIONS = {
    "graph_color": lambda metadata: json.dumps(metadata["possible_answer"]),
    "propositional_logic": lambda metadata: metadata["example_answer"],
    "rubiks_cube": lambda metadata: metadata["example_correct_answer"],
}
"""Where a generator has no answer of its own, and leaves one that its verifier takes."""
NO_SOLUTION = {"boxnet", "rush_hour"}
"""Generators that leave none."""
LARGE_CUBES = ("rubiks_cube", 3)
"""Its verifier does not take its own solution of a cube of six."""
ANYTHING_IS_RIGHT = {"game_of_life_halting"}
NAN_IS_NO_NUMBER = {"complex_arithmetic": 0.0, "countdown": 0.01}
"""What "nan" is worth here, where the package's verifiers give 1 and 0.05."""
FEW_FILES = 8
"""Of the process that draws: three streams, its answers, and what the interpreter has open."""
RAISES = {"prime_factorization"}
"""Verifiers that raise on text."""
UNSOUND_ANSWERS = {"coin_flip": ("0", "1"), "game_of_life_halting": ("who knows",), "puzzle24": ("6*4*1*1",)}
"""Answers of which one is always right."""
BY_HASH = {"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"}
"""Generators that give another task in a process with another hash seed."""


@pytest.fixture(scope="module")
def library() -> Iterator[Library]:
    made = Library()
    yield made
    made.close()


@pytest.fixture(scope="module", autouse=True)
def _ended() -> Iterator[None]:
    yield
    gym_library().close()


def task_of(generator: Generator, level: int | None, found: Mapping[str, Any]) -> dict[str, Any]:
    return {"generator": generator.name, "level": level, "parameters": json.dumps(generator.parameters), **found}


def solution_of(name: str, found: Mapping[str, Any]) -> str | None:
    if name in SOLUTIONS:
        return str(SOLUTIONS[name](package.entry_of("", found["entry"])["metadata"]))
    return None if name in NO_SOLUTION else str(found["answer"])


def test_every_generator_is_there_but_the_mixture_of_others(library: Library) -> None:
    from reasoning_gym.factory import DATASETS

    assert set(library.names()) == set(DATASETS) - {"composite"}
    assert len(library.names()) == 105
    with pytest.raises(GymRefused, match="'composite' mixes other generators: name these in generators"):
        library.levels(Generator(name="composite"))


@pytest.mark.parametrize("name", NAMES)
def test_a_generator_makes_tasks_that_its_verifier_scores(library: Library, name: str) -> None:
    generator = Generator(name=name)
    levels = library.levels(generator)
    for level in (None, *levels[:1], *levels[-1:]):
        found = library.draw(generator, level, 3)
        task = task_of(generator, level, found)
        require_plain("task", task, MAX_TASK_BYTES)
        assert found["question"].strip()
        solution = None if (name, level) == LARGE_CUBES else solution_of(name, found)
        assert solution is None or score(solution, task, CPU_S)["score"] == pytest.approx(1.0), task
        for answer in (GARBAGE, None):
            verdict = score(answer, task, CPU_S)
            assert verdict["score"] < 1 or (name in ANYTHING_IS_RIGHT and answer is not None), task
            assert verdict["unscored"] == (name in RAISES and answer is not None), task


def test_all_these_draws_have_left_no_file_open(library: Library) -> None:
    library.draw(Generator(name="chain_sum"), None, 3)
    assert library._process is not None
    assert len(os.listdir(f"/proc/{library._process.pid}/fd")) <= FEW_FILES


@pytest.mark.parametrize("name", NAMES)
def test_a_score_is_the_packages_own(library: Library, name: str) -> None:
    """The entry has gone through JSON, and the verifier through a fork."""
    from reasoning_gym import create_dataset

    number, found = _first_drawn(library, Generator(name=name), 11)
    task = task_of(Generator(name=name), None, found)
    dataset = create_dataset(name, seed=0, size=package.CHUNK)
    random.seed(number)
    np.random.seed(number)
    entry = dataset[number] if name not in BY_HASH else package.entry_of(found["question"], found["entry"])
    assert (found["question"], found["answer"]) == (
        entry["question"],
        "" if entry["answer"] is None else str(entry["answer"]),
    )
    right = solution_of(name, found)
    near = () if right is None else (right, right[:-1], f" {right} ", right.replace("1", "2"), right.upper())
    for answer in (*near, "7", "{}", "nan", "[[1]]"):
        own = NAN_IS_NO_NUMBER[name] if answer == "nan" and name in NAN_IS_NO_NUMBER else _own(dataset, answer, entry)
        assert score(answer, task, CPU_S)["score"] == pytest.approx(own), (answer, task)


def _first_drawn(library: Library, generator: Generator, number: int) -> tuple[int, Mapping[str, Any]]:
    """A task from ``number`` on: some are not drawn in time."""
    while True:
        try:
            return number, library.draw(generator, None, number)
        except GymRefused:
            number += 1


def _own(dataset: Any, answer: str, entry: dict[str, Any]) -> float:
    """What the verifier returns; 0 where it raises or returns no finite number."""
    try:
        value = float(dataset.score_answer(answer, entry))
    except Exception:  # noqa: BLE001
        return 0.0
    return value if abs(value) < float("inf") else 0.0


def test_tasks_follow_from_their_number_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In another process, in another order, whatever hash seed their parent was given."""
    first, second = Library(), Library()
    try:
        monkeypatch.setenv("PYTHONHASHSEED", "7")
        first.version()
        monkeypatch.setenv("PYTHONHASHSEED", "8")
        second.version()
        wanted = [(name, level) for name in NAMES for level in (None, *first.levels(Generator(name=name))[:1])]
        found = {each: first.draw(Generator(name=each[0]), each[1], 5) for each in wanted}
        again = {each: second.draw(Generator(name=each[0]), each[1], 5) for each in reversed(wanted)}
    finally:
        first.close()
        second.close()
    assert [each for each in wanted if found[each] != again[each]] == []


def test_the_splits_have_no_question_in_common_and_levels_get_harder() -> None:
    environment = create_environment("reasoning_gym", {"generators": "chain_sum", "num_eval_tasks": 60})
    train, held_out = environment.tasks("train"), environment.tasks("eval")
    trained = {train.task(index)["question"] for index in range(300)}
    asked = [held_out.task(index) for index in range(60)]
    assert not trained & {task["question"] for task in asked}
    assert sorted({task["level"] for task in asked}) == list(range(11))
    assert train.task(0)["level"] == 0
    lengths = {level: len(str(train.task(level + 2003)["question"])) for level in (0, 10)}
    assert lengths[0] < lengths[10]


def test_one_line_is_enough() -> None:
    tasks = create_environment("reasoning_gym", {}).tasks("train")
    assert [ladder.name for ladder in tasks.ladders] == [name for name in NAMES if name not in UNSOUND]
    assert tasks.digest == "reasoning-gym 0.1.25"
    assert [tasks.task(index)["generator"] for index in (0, 1, 102)] == ["ab", "acre", "ab"]


@pytest.mark.parametrize(("name", "answers"), UNSOUND_ANSWERS.items())
def test_who_names_a_generator_whose_verifier_takes_almost_anything_gets_it(name: str, answers: tuple[str, ...]) -> None:
    tasks = create_environment("reasoning_gym", {"generators": name, "curriculum": False}).tasks("train")
    for index in range(4):
        assert max(score(answer, tasks.task(index), CPU_S)["score"] for answer in answers) == 1


def test_instructions_and_answers_are_the_packages_own() -> None:
    from reasoning_gym.utils import SYSTEM_PROMPTS, extract_answer

    assert SYSTEM_PROMPTS["default"] == SYSTEM_PROMPT
    for text in (
        "<answer>7</answer>",
        "a <answer> 1 <answer>2</answer> b</answer>",
        "<answer>\n x\n</answer>",
        "7",
        "<answer>",
    ):
        assert stated_answer(text, "tagged") == extract_answer(text)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"generators": "chain_sums"}, "has no generator 'chain_sums': do you mean chain_sum"),
        ({"generators": "zzz"}, "has no generator 'zzz': its generators are ab, "),
        (
            {"generators": [{"name": "chain_sum", "parameters": {"max_term": 3}}]},
            "generator 'chain_sum' has no parameter 'max_term': its parameters are min_terms, max_terms, min_digits",
        ),
        (
            {"generators": [{"name": "chain_sum", "parameters": {"max_terms": "many"}}]},
            "generator 'chain_sum': max_terms is 'many': expected `int`, got `str`",
        ),
        (
            {"generators": [{"name": "chain_sum", "parameters": {"min_terms": 5, "max_terms": 3}}]},
            "min_terms = 5, max_terms = 3 refuses its parameters: max_terms must be >= min_terms",
        ),
        (
            {"generators": [{"name": "chain_sum", "parameters": {"max_terms": 3, "min_terms": 0}}]},
            "min_terms must be positive",
        ),
        (
            {"generators": [{"name": "chain_sum", "parameters": {"seed": 3}}]},
            "seed is no parameter here: tasks have no end, and the option seed chooses others",
        ),
        ({"generators": ["chain_sum", "chain_sum"]}, 'two ladders are called "chain_sum": give one of them another name'),
        ({"generators": [{"name": "chain_sum", "weight": float("inf")}]}, "chain_sum: weight is inf and num_groups is 8"),
        (
            {"generators": "chain_sum", "curriculum": {"first_level": 4, "last_level": 2}},
            "first_level is 4 and last_level is 2",
        ),
        (
            {"generators": [{"name": "rush_hour", "parameters": {"min_moves": 900, "max_moves": 999}}]},
            "No puzzles found with moves between 900 and 999",
        ),
    ],
)
def test_what_is_wrong_is_named_with_the_way_out(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as caught:
        create_environment("reasoning_gym", options).tasks("train")
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("rules", "levels"),
    [({}, (0, 10)), ({"last_level": 5}, (0, 5)), ({"last_level": 99}, (0, 10)), ({"first_level": 99}, (10, 10))],
)
def test_a_ladder_has_the_levels_that_there_are(rules: dict[str, int], levels: tuple[int, int]) -> None:
    tasks = create_environment("reasoning_gym", {"generators": "chain_sum", "curriculum": rules}).tasks("train")
    assert [(each.first_level, each.last_level) for each in tasks.ladders] == [levels]


def test_parameters_hold_at_every_level_and_fix_a_ladder_that_they_fill() -> None:
    fixed = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    half = {"max_digits": 1, "min_digits": 1}
    of = lambda parameters: create_environment(  # noqa: E731
        "reasoning_gym", {"generators": [{"name": "chain_sum", "parameters": parameters}]}
    ).tasks("train")
    assert [(each.first_level, each.last_level) for each in of(fixed).ladders] == [(0, 0)]
    assert [(each.first_level, each.last_level) for each in of(half).ladders] == [(0, 10)]
    metadata = [package.entry_of("", str(of(half).task(index)["entry"]))["metadata"] for index in (0, 10)]
    assert [each["difficulty"] for each in metadata] == [
        {"num_terms": (2, 2), "num_digits": (1, 1)},
        {"num_terms": (2, 12), "num_digits": (1, 1)},
    ]


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("countdown", "9**9**9**9"),
        ("countdown", "(" * 5_000),
        ("countdown", "__import__('os')._exit(0)"),
        ("polynomial_equations", "nan"),
        ("polynomial_equations", "99e999999"),
        ("simple_integration", "x**(9**9**9)"),
        ("boxnet", "[]"),
        ("boxnet", '{"a": 1}'),
    ],
)
def test_no_answer_ends_the_worker_or_goes_without_a_score(library: Library, name: str, answer: str) -> None:
    task = task_of(Generator(name=name), None, library.draw(Generator(name=name), None, 3))
    verdict = score(answer, task, 2.0)
    assert 0 <= verdict["score"] < 1


def test_a_generator_that_does_not_end_costs_its_task_alone(library: Library) -> None:
    refusals = []
    for number in range(4):
        try:
            library.draw(Generator(name="jugs"), 3, number)
        except GymRefused as error:
            refusals.append(str(error))
    assert any("took too long" in text for text in refusals)
    assert library.draw(Generator(name="chain_sum"), 0, 3)["question"]
