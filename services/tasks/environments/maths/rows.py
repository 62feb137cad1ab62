"""A row as a question with its answer, whatever its layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from gspo.tasks.environments import ChatMessage
from gspo_services.tasks.environments.maths.conventions import marker_of
from gspo_services.tasks.environments.maths.gold_text import Gold, GoldReading, gold_in
from gspo_services.tasks.environments.maths.layouts import (
    LAST_MESSAGE,
    SOLUTION_COLUMNS,
    Columns,
    QuestionLayout,
    ends_with_answer,
    is_marked,
    layout_of,
)
from gspo_services.tasks.environments.sources import chat_messages, column_of

NAME_COLUMNS: Final = ("id", "ID", "unique_id")


class Question(NamedTuple):
    """What is asked, and the answer."""

    prompt: Any
    """Text, or messages."""
    gold: Gold | None
    """None: the row has none, and a reward of the user's own grades."""
    marker: str | None
    """What the policy's answer stands behind by the row's own convention; "" for a box; None: the row does not say."""
    gold_is_marked: bool
    """The gold stands behind GSM8K's marker."""


def read_question(record: dict[str, Any], columns: Columns, *, compared: bool) -> Question:
    """The question of a row. ``compared``: see ``gold_in``. Raises: ValueError with what is wrong."""
    layout = layout_of(record, columns)
    prompt = _prompt(record, layout, columns)
    raw = _raw_gold(record, layout, columns)
    gold = None
    if layout.answer:
        is_last = layout.answer == LAST_MESSAGE
        column = layout.prompt if is_last else layout.answer
        is_solution = is_last or column in SOLUTION_COLUMNS
        try:
            gold = gold_in(raw, GoldReading(column, columns.gold_marker, is_solution, compared))
        except ValueError:
            # A reward of the user's own need not have what we take for the answer.
            if columns.needs_answer or columns.answer:
                raise
    if layout.name == "OlympiadBench":
        prompt, gold = _olympiad(record, str(prompt), gold)
    gold_is_marked = columns.gold_marker == "auto" and is_marked(raw)
    return Question(prompt, gold, marker_of(record, prompt), gold_is_marked)


def name_in(record: Mapping[str, Any]) -> str:
    """What the row is called; "" where it has no name."""
    return next((str(record[name]) for name in NAME_COLUMNS if record.get(name) is not None), "")


def _prompt(record: dict[str, Any], layout: QuestionLayout, columns: Columns) -> str | list[ChatMessage]:
    value = column_of(record, layout.prompt, f"{columns.prompt_option} says")
    if isinstance(value, list):
        # The answer that a conversation ends with is never shown to the policy.
        is_answered = bool(layout.answer) and ends_with_answer(value)
        return chat_messages(layout.prompt, value[:-1] if is_answered else value)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f'column "{layout.prompt}" is {repr(value)[:100]}, not the text of a question, nor messages')
    text = str(value).strip()
    if not text:
        raise ValueError(f'column "{layout.prompt}" is empty: nothing is asked')
    return text


def _raw_gold(record: dict[str, Any], layout: QuestionLayout, columns: Columns) -> Any:
    if layout.answer != LAST_MESSAGE:
        return column_of(record, layout.answer, f"{columns.answer_option} says") if layout.answer else None
    last = record[layout.prompt][-1]
    if isinstance(truth := last.get("ground_truth"), dict):
        return truth.get("value")
    return last.get("content", last.get("value"))


def _olympiad(record: Mapping[str, Any], question: str, gold: Gold | None) -> tuple[str, Gold | None]:
    """With its context and what its judge asks for. Raises: ValueError for what a comparison of texts cannot decide."""
    if record.get("error"):
        raise ValueError(
            f'column "error" is {str(record["error"])[:50]!r}: an answer within that tolerance is right, and this '
            "comparison is exact"
        )
    images = [name for name in record if str(name).startswith("image") and record[name] is not None]
    if images or "<img_" in question or "<image_" in question:
        raise ValueError("it asks about an image, and the policy sees text")
    if "human" in str(record.get("answer_type") or "").lower():
        raise ValueError(f'column "answer_type" is {str(record["answer_type"])[:50]!r}: a person judges its answer')
    parts = [str(record["context"]).strip()] if record.get("context") else []
    parts.append(question)
    if record.get("is_multiple_answer"):
        parts.append("Give all answers, separated by commas.")
        gold = ", ".join(gold) if isinstance(gold, list) else gold
    if record.get("unit"):
        parts.append(f"Give the answer in {record['unit']}, without the unit.")
    return "\n".join(parts), gold
