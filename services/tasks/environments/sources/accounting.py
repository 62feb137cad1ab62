"""What becomes of each column of a file: shown to the policy, gold, about the row, or left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

ABOUT_THE_ROW: Final = frozenset((
    "id", "ID", "_id", "qid", "uid", "uuid", "idx", "index", "question_id", "example_id", "unique_id", "problem_id",
    "hash", "url", "link", "source", "src", "dataset", "origin", "data_source", "ability", "extra_info", "split", "level",
    "difficulty", "rating", "subject", "subfield", "topic", "category", "type", "domain", "year", "date", "created_at",
    "task", "size", "language", "lang", "license", "author", "problem_type", "question_type", "question_concept",
    "choice_type", "title", "tags", "meta", "meta_info", "metadata", "style", "env_class", "topic_name", "subject_name",
    "test_id", "problem_is_valid", "solution_is_valid", "synthetic", "is_multiple_answer", "unit", "answer_type", "error",
    "license_url",
))  # fmt: skip
"""Columns that say something about a row, and are no part of what is asked."""
PARTS_OF_QUESTIONS: Final = (
    "choice", "option", "distractor", "context", "passage", "article", "paragraph", "document", "story", "background",
    "input", "image", "figure", "picture", "audio", "video", "table", "puzzle", "premise", "hypothesis", "fact", "support",
    "instruction", "constraint", "schema", "html", "text", "sentence", "nums", "numbers",
)  # fmt: skip
"""A column with such a word in its name, which is left out, may be a part of the question."""
MOST_COLUMNS: Final = 1_000
"""Of a source that are followed: rows may bring new ones without end."""
MOST_SHOWN: Final = 40
MOST_CHARS: Final = 60
NO_PART: Final = ("solution", "rationale", "explanation", "supporting_facts", "output", "response", "completion")


class Roles(NamedTuple):
    """Columns of one row that are used, whatever they hold; those inside others by their outer names."""

    shown: tuple[str, ...] = ()
    gold: tuple[str, ...] = ()
    used: tuple[str, ...] = ()
    """For rewards of the user's own, filters and identities."""


class ColumnUse(NamedTuple):
    """What became of the columns that say something in any row of a source, each kind in the order of the file."""

    shown: list[str]
    gold: list[str]
    metadata: list[str]
    left_out: list[str]

    @property
    def suspicious(self) -> list[str]:
        """Those left out that look like a part of the question."""
        return [name for name in self.left_out if looks_like_question(name)][:MOST_SHOWN]

    def __str__(self) -> str:
        parts = zip(("shown", "gold", "metadata", "left out"), self, strict=True)
        return "; ".join(f"{what}: {_listed(names)}" for what, names in parts if names)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MOST_SHOWN:,} more" if len(names) > MOST_SHOWN else ""
    return ", ".join(name[:MOST_CHARS] for name in names[:MOST_SHOWN]) + more


def looks_like_question(name: str) -> bool:
    """Whether the name of a column says that it may be a part of a question."""
    lower = name.lower()
    return any(part in lower for part in PARTS_OF_QUESTIONS) and not any(part in lower for part in NO_PART)


class Accounting:
    """Goes through the rows of a source."""

    def __init__(self, roles: Callable[[Mapping[str, Any]], Roles]) -> None:
        self._roles = roles
        self._filled: dict[str, None] = {}
        self._found = Roles()

    def take(self, record: Mapping[str, Any]) -> None:
        """Take note of a row's columns; most rows bring nothing new. Raises: ValueError as ``roles`` does."""
        if len(self._filled) >= MOST_COLUMNS:
            return
        new = [name for name in record if name not in self._filled and record[name] not in (None, "", [], {})]
        if new:
            self._filled |= dict.fromkeys(new)
            self._found = Roles(*(one + other for one, other in zip(self._found, self._roles(record), strict=True)))

    @property
    def use(self) -> ColumnUse:
        """What was found so far."""
        shown, gold, used = (_outer(names) for names in self._found)
        of = ColumnUse([], [], [], [])
        for name in self._filled:
            is_shown, is_gold = name in shown, name in gold
            if is_shown:
                of.shown.append(name)
            if is_gold:
                of.gold.append(name)
            if not (is_shown or is_gold):
                (of.metadata if name in used or name in ABOUT_THE_ROW else of.left_out).append(name)
        return of


def _outer(names: tuple[str, ...]) -> frozenset[str]:
    """Names, and the outer columns of dotted ones."""
    return frozenset(part for name in names for part in (name, name.partition(".")[0]))
