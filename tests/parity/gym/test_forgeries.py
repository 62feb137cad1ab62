"""Forged answers: the package's verifiers take them and ours do not. Honest answers have the package's score."""

from __future__ import annotations

import ast
import importlib
import inspect
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import sympy

from gspo_services.tasks.gym import Generator, GymRefused, Library

pytestmark = [
    pytest.mark.parity,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::SyntaxWarning"),
]
pytest.importorskip("reasoning_gym")

package = importlib.import_module("gspo_services.tasks.gym.library")
evaluating = importlib.import_module("gspo_services.tasks.gym.evaluating")
Entry = Mapping[str, Any]

FORGED: Mapping[str, Callable[[Entry], str]] = {
    "binary_matrix": lambda _: "[row.split() for row in oracle_answer.split(chr(10))]",
    "complex_arithmetic": lambda _: "nan",
    "countdown": lambda entry: "0x{target:x} + ({})*(1e0 - 1e0)".format(
        "+".join(map(str, entry["metadata"]["numbers"])), **entry["metadata"]
    ),
    "intermediate_integration": lambda entry: "integrate({integrand}, {variable})".format(**entry["metadata"]),
    "n_queens": lambda _: "[row.split() for row in valid_solutions[0].split(chr(10))]",
    "number_sorting": lambda entry: "[" + ", ".join(["NaN"] * len(ast.literal_eval(entry["answer"]))) + "]",
    "polynomial_multiplication": lambda entry: "expand({polynomial_expr})".format(**entry["metadata"]),
    "simple_integration": lambda entry: "Integral({integrand}, {variable})".format(**entry["metadata"]),
    "spiral_matrix": lambda _: "entry['answer'].split()",
    "string_insertion": lambda _: "entry['answer']",
}
"""Each names the right answer, has it worked out, or is no number."""
RUNS_CODE = sorted(set(FORGED) - {"complex_arithmetic", "number_sorting"} | {"puzzle24"})
TEXT_OF_ITS_OWN = {
    "basic_arithmetic", "bf", "bitwise_arithmetic", "codeio", "decimal_arithmetic", "gsm_symbolic", "number_sorting",
}  # fmt: skip
"""Modules that evaluate or compile what the package has written, and no answer."""
NOT_PYTHON = {"propositional_logic"}
"""It has a reader of its own by such a name."""


@pytest.fixture(scope="module")
def library() -> Iterator[Library]:
    made = Library()
    yield made
    made.close()


def task(library: Library, name: str, level: int | None = None, number: int = 3) -> tuple[Any, Entry]:
    """The data set and an entry of it."""
    while True:
        try:
            found = library.draw(Generator(name=name), level, number)
        except GymRefused:
            number += 1
            continue
        return package.dataset_of(Generator(name=name), level), package.entry_of(found["question"], found["entry"])


def packages_own(dataset: Any, answer: str, entry: Entry) -> float:
    return float(dataset._ready().score_answer(answer, entry))


@pytest.mark.parametrize("name", FORGED)
def test_an_answer_cannot_say_its_own_score(library: Library, name: str) -> None:
    dataset, entry = task(library, name)
    forged, nonsense = FORGED[name](entry), "no idea ((("
    assert packages_own(dataset, forged, entry) > packages_own(dataset, nonsense, entry), "the package takes it"
    assert dataset.score(forged, entry) == packages_own(dataset, nonsense, entry)


@pytest.mark.parametrize("name", RUNS_CODE)
def test_an_answer_runs_no_code(library: Library, name: str, tmp_path: Path) -> None:
    dataset, entry = task(library, name)
    for folder, score in (("ours", dataset.score), ("theirs", lambda *given: packages_own(dataset, *given))):
        score(f"__import__('os').mkdir({str(tmp_path / folder)!r})", entry)
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_no_other_verifier_evaluates_answers() -> None:
    """By the text of each module: whoever evaluates anything is known."""
    words = re.compile(r"\b(eval|exec|compile|parse_expr|sympify|lambdify|__import__|pickle|subprocess)\b")
    found = set()
    for name in package.generator_names():
        module = sys.modules[package.DATASETS[name][0].__module__]
        text = re.sub(r"re\.compile", "", inspect.getsource(module))
        if words.search(text):
            found.add(name)
    assert found - TEXT_OF_ITS_OWN - NOT_PYTHON == set(RUNS_CODE)
    assert all(evaluating.is_guarded(name) for name in RUNS_CODE)


def test_a_verifier_that_evaluates_in_a_new_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = package.DATASETS["ab"][0]
    monkeypatch.setattr(kind, "score_answer", lambda self, answer, entry: eval(answer))
    with pytest.raises(GymRefused, match=r"generator 'ab' in reasoning-gym 0\.1\.25 evaluates answers as Python"):
        package.GymDataset(Generator(name="ab"), None)


def wrong(name: str, entry: Entry, rng: random.Random) -> str:
    """An answer that someone gave who tried."""
    right = str(entry["answer"])
    digits = [match.start() for match in re.finditer(r"\d", right)]
    place = rng.choice(digits) if digits else 0
    other = right[:place] + rng.choice("123456789") + right[place + 1 :]
    match name:
        case "countdown" | "puzzle24":
            numbers = list(entry["metadata"]["numbers"])
            rng.shuffle(numbers)
            text = str(numbers[0])
            for number in numbers[1:]:
                text = f"{rng.choice(['', '(', ' '])}{text} {rng.choice('+-*/')} {number}"
                text += ")" if text.startswith("(") and text.count("(") > text.count(")") else ""
            return rng.choice([text, f"{text} = {rng.randint(1, 99)}", text.replace("*", "x"), other])
        case "simple_integration" | "intermediate_integration":
            renamed = right.replace("+ C", rng.choice(["", "+ K", "+ c", "+ const", "- 7"]))
            return rng.choice([other, renamed, right.replace("log", "ln"), right.replace("**", "^"), f"F = {right}"])
        case "polynomial_multiplication":
            return rng.choice(
                [other, entry["metadata"]["polynomial_expr"], right.replace("**", "^"), right.replace(" ", "")]
            )
        case "binary_matrix" | "n_queens" | "spiral_matrix" | "string_insertion":
            rows = [list(row.split()) for row in right.split("\n")]
            flat = list(right.replace(" ", "").replace("\n", ""))
            return rng.choice([other, repr(rows), repr(flat), f" {right}", repr(right.split()), str(rows).replace("'", "")])
        case _:
            return rng.choice([other, other.replace("i", "j"), right.replace("'", ""), right[1:], "inf", "1e999", "[1, 2]"])


EVALUATOR = {
    "countdown": evaluating.arithmetic,
    "intermediate_integration": evaluating.algebra,
    "polynomial_multiplication": evaluating.algebra,
    "puzzle24": evaluating.arithmetic,
    "simple_integration": evaluating.algebra,
}
UNSOLVED = "Integral("
"""Some answers of the package's own are this, where SymPy has found none. It is worth nothing: a solution there is."""


@pytest.mark.parametrize("name", sorted({*RUNS_CODE, *FORGED}))
def test_honest_answers_have_the_packages_score(library: Library, name: str) -> None:
    """Where ours and SymPy's evaluator agree, the rest of the verifier is the same, and may take seconds."""
    rng = random.Random(name)
    levels = library.levels(Generator(name=name))
    made_sense = []
    for level in (None, *levels[:1], *levels[-1:]):
        for number in range(4):
            dataset, entry = task(library, name, level, number)
            right = str(entry["answer"])
            if UNSOLVED not in right and number < 2:
                assert dataset.score(right, entry) == 1
            for answer in (right, *(wrong(name, entry, rng) for _ in range(8))):
                if UNSOLVED in answer:
                    assert dataset.score(answer, entry) == 0
                    continue
                evaluated = value(EVALUATOR.get(name), answer)
                made_sense.append(evaluated is not None)
                if evaluated is None or evaluated != value(sympy.parse_expr, answer):
                    assert dataset.score(answer, entry) == packages_own(dataset, answer, entry), (answer, entry)
    assert name not in EVALUATOR or sum(made_sense) > len(made_sense) / 2


def value(evaluator: Callable[[str], Any] | None, text: str) -> Any:
    """None: it has none."""
    try:
        return None if evaluator is None else evaluator(text)
    except Exception:  # noqa: BLE001
        return None
