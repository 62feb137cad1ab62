"""The options of a row of multiple choice: where public sets have them, and which one its gold names.

| set | options | the right one |
|---|---|---|
| MMLU, MMLU-Pro, RACE, ReClor, Zebra | choices, options or answers: a list | a number from 0, a letter, or its text |
| AQuA, MathQA | options: each with its own letter, or all in one text | a letter |
| ARC, OpenBookQA, CommonsenseQA | choices: {"text", "label"} | a label |
| MedQA | options: {"A": ...} | answer_idx, or its text |
| MedMCQA, Social IQa, PIQA, WinoGrande, SWAG, CMMLU | a column each (``_FAMILIES``) | a number, or a letter |
| GPQA, SciQ | the right one in a column of its own, the wrong ones in others | that column |
| TruthfulQA | mc1_targets: {"choices", "labels"} | its label 1 |

Where the row itself has the right one first, all are put into an order that only their texts decide.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

from gspo.tasks.maths import is_same_vote

MOST: Final = 26
LETTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
OPTION_COLUMNS: Final = ("choices", "options", "answer_choices", "endings", "Choices", "Options", "mc1_targets")
CHOICE_GOLDS: Final = (
    "answerKey", "answer_key", "answer_idx", "answer_index", "correct", "correct_option", "cop", "label", "answer", "Answer",
    "gold", "target", "correct_answer", "ground_truth", "expected_answer", "final_answer",
)  # fmt: skip
"""Where rows with options say which one is right, the surest first."""
_FAMILIES: Final = (
    ("", "ABCDEFGHIJ", 0), ("op", "abcdefghij", 0), ("option_", "abcdefghij", 0), ("option", "ABCDEFGHIJ", 0),
    ("option_", "ABCDEFGHIJ", 0), ("Option ", "ABCDEFGHIJ", 0), ("answer", "ABCDEFGHIJ", 1), ("sol", "123456789", 0),
    ("choice", "123456789", 0), ("option", "123456789", 1), ("ending", "0123456789", 0),
)  # fmt: skip
"""Columns of one option each: their stem, their ends, and the number of the first one in the gold."""
_CORRECT: Final = (
    ("Correct Answer", "Incorrect Answer ", "Incorrect Answer 1"),
    ("correct_answer", "distractor", "distractor1"),
)
_LETTER: Final = re.compile(r"\W*([A-Za-z]|\d+)\s*[).:]?\W*")
_MARK: Final = re.compile(r"\s*\(?\s*([A-Za-z])\s*[).:]\s*")
_MARKS: Final = re.compile(r"(?:^|,)\s*([a-z])\s*\)\s*", re.IGNORECASE)


class Offered(NamedTuple):
    """The options of a row."""

    columns: tuple[str, ...]
    texts: tuple[str, ...]
    """In the order in which they are shown, as A, B, ..."""
    labels: tuple[str, ...]
    """What the row calls them."""
    base: int = 0
    """The number of the first one, where the gold is a number."""
    right: int | None = None
    """The place of the right one, where the row says it without a gold."""
    as_they_are: tuple[str, ...] = ()
    """With the letters that the row gives them itself."""

    @property
    def shown(self) -> str:
        """A line each."""
        if self.as_they_are:
            return "\n".join(self.as_they_are)
        return "\n".join(f"{letter}. {text}" for letter, text in zip(LETTERS, self.texts, strict=False))


def offered_in(record: Mapping[str, Any], column: str) -> Offered | None:
    """The options of a row, in ``column`` ("auto" finds it, "" takes none); None for a row without. Raises: ValueError."""
    if not column:
        return None
    if column != "auto":
        if column not in record:
            raise ValueError(f'no column "{column}": there are {", ".join(sorted(map(str, record)))[:300]} (choices_column)')
        return None if _is_empty(record[column]) else _checked(_of_column(column, record[column]))
    if not _may_offer(tuple(record)):
        return None
    for name in OPTION_COLUMNS:
        if not _is_empty(record.get(name)):
            return _checked(_of_column(name, record[name]))
    if isinstance(record.get("answers"), list) and isinstance(record.get("label"), int):
        # ReClor's; elsewhere answers are golds.
        return _checked(_of_column("answers", record["answers"]))
    found = _with_wrong_ones(record) or _family(record)
    return None if found is None else _checked(found)


@lru_cache(maxsize=256)
def _may_offer(names: tuple[str, ...]) -> bool:
    """Whether columns may hold options: rows of a file have the same ones, and most have none."""
    there = {*names}
    of_families = any({f"{stem}{end}" for end in ends[:2]} <= there for stem, ends, _ in _FAMILIES)
    return of_families or not there.isdisjoint((*OPTION_COLUMNS, "answers", *(first for _, _, first in _CORRECT)))


def place_of(gold: Any, column: str, offered: Offered) -> int:
    """The place of the option that a gold names: a number, a letter or a label, or its text.

    Raises: ValueError for one that names none, and for one that could name two.
    """
    if isinstance(gold, list) and len(gold) == 1:
        gold = gold[0]
    if isinstance(gold, (list, dict, bool)):
        raise ValueError(f'column "{column}" is {repr(gold)[:60]}, which is not one of the options')
    by_text = [place for place, text in enumerate(offered.texts) if _plain(text) == _plain(gold)]
    if isinstance(gold, (int, float)) and not isinstance(gold, bool) and float(gold).is_integer():
        places = [*_by_label(str(int(gold)), offered)] or _by_number(int(gold), offered)
        # A list of numbers may be meant by its values.
        places = places or by_text
    else:
        text = "" if gold is None else str(gold).strip()
        places = _by_label(text, offered) or _by_mark(text, offered)
        places += [place for place in by_text if place not in places]
        if re.fullmatch(r"\d+", text) and not _by_label(text, offered):
            places += [place for place in _by_number(int(text), offered) if place not in places]
        places = places or [place for place, each in enumerate(offered.texts) if text and is_same_vote(each, text)]
    if len(places) == 1:
        return places[0]
    shown = ", ".join(f"{label}: {text[:40]}" for label, text in zip(offered.labels, offered.texts, strict=True))[:200]
    if places:
        raise ValueError(f'column "{column}" is {gold!r}, which could be two of the options ({shown}): give their letters')
    counted = offered.base == 0 and str(gold).strip() == str(len(offered.texts))
    hint = "; counted from 0, it names none: give letters" if counted else ""
    raise ValueError(f'column "{column}" is {repr(gold)[:60]}, which is none of the options ({shown}){hint}')


def _by_label(text: str, offered: Offered) -> list[int]:
    found = _LETTER.fullmatch(text)
    label = found[1].upper() if found else ""
    return [place for place, each in enumerate(offered.labels) if label and each.upper() == label]


def _by_mark(text: str, offered: Offered) -> list[int]:
    """``B) 22``, if that is what B says."""
    mark = _MARK.match(text)
    if mark is None or mark.end() == len(text):
        return []
    places = _by_label(mark[1], offered)
    return [place for place in places if _plain(offered.texts[place]) == _plain(text[mark.end() :])]


def _by_number(number: int, offered: Offered) -> list[int]:
    return [number - offered.base] if 0 <= number - offered.base < len(offered.texts) else []


def _is_empty(value: Any) -> bool:
    return value is None or value in ("", [], {})


def _plain(value: Any) -> str:
    return " ".join(str(value).split()).casefold()


def _checked(offered: Offered) -> Offered:
    where = " and ".join(offered.columns[:3])
    if not 2 <= len(offered.texts) <= MOST:
        raise ValueError(f"{where} has {len(offered.texts)} options: expected 2 to {MOST}")
    if any(not text for text in offered.texts):
        raise ValueError(f"an option in {where} is empty: {list(offered.texts)!r}"[:300])
    if len({*map(_plain, offered.texts)}) < len(offered.texts):
        raise ValueError(f"two options in {where} are the same: {list(offered.texts)!r}"[:300])
    return offered


def _of_column(name: str, value: Any) -> Offered:
    """Raises: ValueError for what is no list of options."""
    if isinstance(value, str):
        value = _parsed(value)
    if isinstance(value, Mapping):
        value = {key: each for key, each in value.items() if each is not None}
        texts = value.get("text", value.get("choices"))
        if isinstance(texts, list) and isinstance(truths := value.get("labels"), list):
            return _mixed(
                (name,), [str(text).strip() for text in texts], [place for place, is_ in enumerate(truths) if is_ == 1]
            )
        if isinstance(texts, list):
            labels = value.get("label") or LETTERS[: len(texts)]
            return _labelled(name, [str(label) for label in labels], texts)
        if all(isinstance(each, (str, int, float)) for each in value.values()):
            return _labelled(name, [str(key) for key in value], list(value.values()))
    if isinstance(value, list) and all(isinstance(each, Mapping) and "text" in each for each in value):
        labels = [str(each.get("label", letter)) for each, letter in zip(value, LETTERS, strict=False)]
        return _labelled(name, labels, [each["text"] for each in value])
    if isinstance(value, list) and all(isinstance(each, (str, int, float)) for each in value):
        return _labelled(name, list(LETTERS[: len(value)]), value)
    raise ValueError(
        f'column "{name}" is {repr(value)[:100]}: expected a list of options, or {{"text": [...], "label": [...]}}; '
        'choices_column names another, and "" none'
    )


def _labelled(name: str, labels: Sequence[str], values: Sequence[Any]) -> Offered:
    texts = [str(each).strip() for each in values]
    if len(labels) != len(texts):
        raise ValueError(f'column "{name}" has {len(texts)} options and {len(labels)} labels')
    marks = [_MARK.match(text) for text in texts]
    if all(mark is not None and mark[1].upper() == letter for mark, letter in zip(marks, LETTERS, strict=False)):
        # AQuA writes the letter before each.
        bare = [text[mark.end() :].strip() for text, mark in zip(texts, marks, strict=True) if mark is not None]
        return Offered((name,), tuple(bare), tuple(labels), as_they_are=tuple(texts))
    return Offered((name,), tuple(texts), tuple(labels))


def _parsed(text: str) -> Any:
    """A list in a table of texts, as JSON or as Python writes it; MathQA's ``a ) 38 , b ) 27``."""
    if text.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(text)
        except ValueError:
            try:
                return ast.literal_eval(text)
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                return text
    marks = list(_MARKS.finditer(text))
    if len(marks) > 1 and [mark[1].upper() for mark in marks] == list(LETTERS[: len(marks)]):
        ends = [*(mark.start() for mark in marks[1:]), len(text)]
        return [text[mark.end() : end].strip() for mark, end in zip(marks, ends, strict=True)]
    return text


def _with_wrong_ones(record: Mapping[str, Any]) -> Offered | None:
    for right, stem, first in _CORRECT:
        if _is_empty(record.get(right)) or _is_empty(record.get(first)):
            continue
        wrong = [name for name in (f"{stem}{number}" for number in range(1, MOST)) if not _is_empty(record.get(name))]
        columns = (right, *wrong)
        return _mixed(columns, [str(record[name]).strip() for name in columns], [0])
    return None


def _mixed(columns: tuple[str, ...], texts: Sequence[str], right: Sequence[int]) -> Offered:
    """In an order by their texts alone: the same in every run, and no place is right more often than another."""
    if len(right) != 1:
        raise ValueError(f'column "{columns[0]}" marks {len(right)} options as right: expected one')
    whole = "\x1f".join(sorted(texts))
    order = sorted(range(len(texts)), key=lambda place: hashlib.blake2b(f"{whole}\x1e{texts[place]}".encode()).digest())
    mixed = tuple(texts[place] for place in order)
    return Offered(columns, mixed, tuple(LETTERS[: len(mixed)]), right=order.index(right[0]))


def _family(record: Mapping[str, Any]) -> Offered | None:
    for stem, ends, base in _FAMILIES:
        names = [f"{stem}{end}" for end in ends]
        there = [name for name in names if isinstance(record.get(name), (str, int, float)) and not _is_empty(record[name])]
        if len(there) > 1 and there == names[: len(there)]:
            texts = tuple(str(record[name]).strip() for name in there)
            return Offered(tuple(there), texts, tuple(LETTERS[: len(texts)]), base)
    return None
