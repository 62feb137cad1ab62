"""No permutation of a gold is right where its type does not allow it, and each gold is right however it is written."""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gspo.tasks.grading import ending_of
from gspo.tasks.maths import GoldKind, gold_kind
from tests.support.files.public_data import PUBLIC_DATA

NUM_TRIED = 2_000
WORDS = (
    "god",
    "ABC",
    "Paris",
    "cat",
    "no",
    "Evelyn",
    "red panda",
    "New York City",
    "CO",
    "stop",
    "A B C",
    "north-east",
    "DNA",
)
CODES = ("1-2-3", "98-95", "12/25/1999", "2020-03-05", "10:30", "A-C-B", "March 5, 2020", "4 July 1776", "3:2:1")


def right(gold: str, said: str, kind: GoldKind = "symbolic") -> bool:
    return ending_of(gold, said, kind) == "right"


def public_golds() -> list[str]:
    maths, words = PUBLIC_DATA / "math500" / "test.jsonl", PUBLIC_DATA / "gsm8k" / "test.jsonl"
    if not (maths.is_file() and words.is_file()):
        pytest.skip(f"no MATH-500 and GSM8K in {PUBLIC_DATA} (set GSPO_DATA_DIR)")

    def answers(path: Path) -> list[str]:
        return [json.loads(line)["answer"] for line in path.read_text(encoding="utf-8").splitlines()]

    return [*answers(maths), *(answer.rpartition("#### ")[2] for answer in answers(words))]


def permuted(gold: str, rng: random.Random) -> Iterator[str]:
    """``gold`` with the digits of a number, the letters of a word or the items of a pair of brackets in another order."""
    runs = [*re.finditer(r"\d{2,}|(?<![\\A-Za-z])[A-Za-z]{2,}(?![A-Za-z{])", gold)]
    for run in runs:
        mixed = list(run[0])
        rng.shuffle(mixed)
        yield gold[: run.start()] + "".join(mixed) + gold[run.end() :]
    for run in re.finditer(r"(?<=\()([^(){}]*,[^(){}]*)(?=\))", gold):
        items = run[1].split(",")
        rng.shuffle(items)
        yield gold[: run.start()] + ",".join(items) + gold[run.end() :]


def is_allowed(gold: str, said: str) -> bool:
    """The same characters, or numbers of the same value: 0.50 and 0.05 are not."""
    if re.sub(r"\s", "", gold).lower() == re.sub(r"\s", "", said).lower():
        return True
    # Letters beside numbers are variables, whose order is free: 2ab is 2ba. Several answers have no order.
    return (
        gold_kind(gold) in ("expression", "equation", "beyond")
        and sorted(gold) == sorted(said)
        and (re.sub(r"[A-Za-z]", "", gold) == re.sub(r"[A-Za-z]", "", said))
    )


def test_no_permutation_of_a_public_gold_is_right() -> None:
    golds, rng, tried, paid = public_golds(), random.Random(65), 0, list[tuple[str, str]]()
    while tried < NUM_TRIED:
        gold = rng.choice(golds)
        for said in permuted(gold, rng):
            if not is_allowed(gold, said):
                tried += 1
                paid += [(gold, said)] if right(gold, said) else []
    assert paid == []


@pytest.mark.parametrize("gold", [*WORDS, *CODES])
@pytest.mark.parametrize("kind", ["symbolic", "text", "list"])
def test_no_permutation_of_a_word_or_a_code_is_right(gold: str, kind: GoldKind) -> None:
    rng, plain = random.Random(gold), re.sub(r"\s", "", gold).lower()
    wrong = {"".join(rng.sample(gold, len(gold))) for _ in range(100)}
    wrong = {said for said in wrong if re.sub(r"[^\w]", "", said).lower() != re.sub(r"[^\w]", "", plain)}
    assert [said for said in wrong if right(gold, said, kind)] == []
    assert right(gold, gold, kind)


@pytest.mark.parametrize(
    ("kind", "gold", "said", "is_right"),
    [
        ("expression", "abc", "cab", True), ("symbolic", "abc", "cab", False), ("symbolic", "ab", "a \\cdot b", True),
        ("symbolic", "ab", "b \\cdot a", False), ("symbolic", "2ab", "2ba", True), ("symbolic", "no", "No", True),
        ("symbolic", "1, 2, 3", "3, 1, 2", True), ("list", "1, 2, 3", "3, 1, 2", False),
        ("list", "1, 2, 3", "[1, 2, 3]", True),
        ("list", "cat, dog", "cat and dog", True), ("list", "cat, dog", "dog, cat", False),
        ("list", "\\frac12, 3", "0.5, 3", True),
        ("text", "The Beatles", "beatles", True), ("text", "AC/DC", "DC/CA", False), ("text", "-5", "5", False),
        ("text", "1,000", "1000.0", True), ("text", "C++", "C", False), ("text", "5%", "5", False),
        ("text", "vitamin A", "vitamin", False), ("text", "3.5", "35", False),
        ("text", "Dvořák", "Dvo\u0159ák", True), ("text", "東京", "京東", False), ("symbolic", "東京A", "京東A", False),
        ("symbolic", "March 5, 2020", "2020-03-05", True), ("symbolic", "5th of March 2020", "Mar. 5, 2020", True),
        ("symbolic", "2020-03-05", "2020-05-03", False), ("symbolic", "2020-03-05", "2012", False),
        ("symbolic", "March 5", "5 March", True), ("symbolic", "March 5", "5 May", False), ("symbolic", "98-95", "3", False),
        ("symbolic", "98-95", "98\u201395", True), ("symbolic", "B", "A", False), ("symbolic", "(1,2)", "(2,1)", False),
        ("symbolic", "\\{1,2\\}", "\\{2,1\\}", True), ("symbolic", "3:4", "4:3", False),
        ("symbolic", "12 \\text{ cm}", "21 cm", False),
        ("countdown", "98 = 44, 19, 35", "19 + 35 + 44", True), ("countdown", "98 = 44, 19, 35", "98", False),
    ],
)  # fmt: skip
def test_what_a_type_allows(kind: GoldKind, gold: str, said: str, is_right: bool) -> None:
    assert right(gold, said, kind) is is_right


@pytest.mark.parametrize(
    "wrapped",
    [
        "{}", "${}$", "\\({}\\)", " {} ", "{}.", "**{}**", "\\boxed{{{}}}", "\\displaystyle {}", "The answer is {}",
        "{{{}}}", "Answer: {}",
    ],
)  # fmt: skip
def test_a_public_gold_is_right_in_each_way_to_write_it(wrapped: str) -> None:
    golds = random.Random(0).sample(public_golds(), 300)
    assert [gold for gold in golds if not right(gold, wrapped.format(gold))] == []


OPTIONS = ("12", "\\frac{1}{2}", "Mars", "B", "none of these")


@pytest.mark.parametrize(
    ("said", "chosen"),
    [
        ("A", "A"), ("(a)", "A"), ("A.", "A"), ("\\text{Option A}", "A"), ("\\textbf{(A)}\\ 12", "A"), ("A) 12", "A"),
        ("A: 12", "A"),
        ("12", "A"), ("A 12", "A"), ("0.5", "B"), ("B", "B"), ("(B) 1/2", "B"), ("mars", "C"), ("C. Mars", "C"),
        ("D", "D"),
        ("None of these", "E"), ("(A) 0.5", ""), ("(A) or (B)", ""), ("A, B", ""), ("F", ""), ("13", ""),
        ("", ""), ("arsM", ""),
        ("A. 12 B. 0.5", ""), ("A and B", ""),
    ],
)  # fmt: skip
def test_an_option_is_chosen_by_its_letter_or_its_text(said: str, chosen: str) -> None:
    assert "".join(letter for letter in "ABCDE" if ending_of(letter, said, "symbolic", OPTIONS) == "right") == chosen


@pytest.mark.parametrize("said", ["\\textbf{(B)}\\ 12", "(B) 12", "B. 12", "B) 12", "\\text{Option B}", "(b)"])
@pytest.mark.parametrize("gold", ["B", "(B)", "\\text{(B)}"])
def test_a_letter_with_the_text_of_its_option_is_that_letter(gold: str, said: str) -> None:
    assert right(gold, said)
    assert not right(gold.replace("B", "C"), said)


def test_what_two_words_share_beside_other_letters_is_not_compared_alone() -> None:
    assert not right("北京 station", "上海 station")
