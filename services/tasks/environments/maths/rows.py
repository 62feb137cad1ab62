"""A row as a question with its answer, whatever its layout."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from gspo.tasks.environments import ChatMessage, Task
from gspo.tasks.maths import GoldKind, countdown_gold
from gspo_services.tasks.environments.maths.conventions import marker_of
from gspo_services.tasks.environments.maths.gold_text import Gold, GoldReading, gold_in
from gspo_services.tasks.environments.maths.layouts import (
    LAST_MESSAGE,
    SOLUTION_COLUMNS,
    SPAN_COLUMNS,
    Columns,
    QuestionLayout,
    ends_with_answer,
    is_countdown,
    is_marked,
    layout_of,
)
from gspo_services.tasks.environments.maths.offered import LETTERS, Offered, place_of
from gspo_services.tasks.environments.maths.passages import INPUT, passage_of
from gspo_services.tasks.environments.sources import chat_messages, column_of

COUNTDOWN_PROMPT: Final = (
    "Using the numbers {nums}, create an expression that equals {target}. You can use basic arithmetic operations "
    "(+, -, *, /), and each number must be used exactly once. Put the expression within \\boxed{{}}."
)
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
    options: tuple[str, ...] = ()
    """Of a multiple choice, as they are shown; the gold is the letter of one."""
    kind: GoldKind | None = None
    """What the gold is, where the layout says it: words out of a passage are "text"."""


def read_question(record: dict[str, Any], columns: Columns, *, compared: bool) -> Question:
    """The question of a row. ``compared``: see ``gold_in``. Raises: ValueError with what is wrong."""
    layout = layout_of(record, columns)
    if layout.name == "Countdown":
        made = countdown_gold(record["target"], record["nums"])
        return Question(COUNTDOWN_PROMPT.format(**record), made, None, False, kind="countdown")
    prompt = _prompt(record, layout, columns)
    passages = [] if layout.name == "OlympiadBench" else _passages(record, layout, prompt)
    if passages:
        before = "\n\n".join(text for name, text in passages if name != INPUT[1])
        prompt = _beside(before, prompt, "\n\n".join(text for name, text in passages if name == INPUT[1]))
    raw = _raw_gold(record, layout, columns)
    if isinstance(raw, dict) and is_countdown({"nums": raw.get("numbers"), "target": raw.get("target")}):
        made = countdown_gold(raw["target"], raw["numbers"])
        return Question(prompt, made, marker_of(record, prompt), False, kind="countdown")
    gold = _gold(raw, layout, columns, compared=compared)
    options: tuple[str, ...] = ()
    if layout.offered is not None:
        prompt, letter = _asked_of(layout.offered, prompt, raw, layout, needed=columns.needs_answer)
        gold, options = (letter, layout.offered.texts) if letter else (gold, ())
    if layout.name == "OlympiadBench":
        prompt, gold = _olympiad(record, str(prompt), gold)
    gold_is_marked = columns.gold_marker == "auto" and is_marked(raw)
    is_reading = not options and (bool(passages) or layout.answer in SPAN_COLUMNS)
    return Question(
        prompt, gold, marker_of(record, prompt), gold_is_marked, options, "text" if is_reading and _is_plain(gold) else None
    )


def _gold(raw: Any, layout: QuestionLayout, columns: Columns, *, compared: bool) -> Gold | None:
    """None for a row without one. Raises: ValueError."""
    if not layout.answer or layout.offered is not None:
        return None if not layout.answer or raw is None else str(raw)
    is_last = layout.answer == LAST_MESSAGE
    column = layout.prompt if is_last else layout.answer
    is_solution = is_last or column in SOLUTION_COLUMNS
    try:
        return gold_in(raw, GoldReading(column, columns.gold_marker, is_solution, compared))
    except ValueError:
        # A reward of the user's own need not have what we take for the answer.
        if columns.needs_answer or columns.answer:
            raise
    return None


def _passages(record: Mapping[str, Any], layout: QuestionLayout, prompt: Any) -> list[tuple[str, str]]:
    """Columns and texts that the prompt does not have already. Raises: ValueError."""
    if not layout.context:
        return []
    asked = _text(prompt)
    found = [(name, passage_of(record[name], name)) for name in layout.context]
    return [(name, text) for name, text in found if text and text not in asked]


def _asked_of(offered: Offered, prompt: Any, raw: Any, layout: QuestionLayout, *, needed: bool) -> tuple[Any, str]:
    """The prompt with the options, and the letter of the right one; "" where the prompt shows them in its own way and the
    gold is no letter, and where a reward of the user's own has no gold. Raises: ValueError."""
    try:
        place = offered.right if offered.right is not None else place_of(raw, layout.answer or "the answer", offered)
    except ValueError:
        if needed:
            raise
        place = None
    letter = "" if place is None else LETTERS[place]
    if not _lists(_text(prompt), offered.texts):
        return _beside("", prompt, offered.shown), letter
    return prompt, letter if str(raw).strip(" ().").upper() == letter else ""


def _lists(text: str, options: tuple[str, ...]) -> bool:
    """Whether a prompt lists the options itself, each behind a letter, a number or a mark of a list."""
    labels = (rf"(?:\b{letter}|\b{place}|\b{place + 1})\W{{1,3}}|\n\W{{0,3}}" for place, letter in enumerate(LETTERS))
    listed = (rf"(?:{label}){re.escape(each)}" for label, each in zip(labels, options, strict=False))
    return all(re.search(pattern, text, re.IGNORECASE) for pattern in listed)


def _beside(before: str, prompt: Any, after: str) -> Any:
    """A prompt, text or messages, with what stands before it and after it."""
    if not before and not after:
        return prompt
    if isinstance(prompt, str):
        return "\n\n".join(filter(None, (before, prompt, after)))
    place = max((number for number, each in enumerate(prompt) if each["role"] == "user"), default=len(prompt) - 1)
    asked = {**prompt[place], "content": _beside(before, prompt[place]["content"], after)}
    return [*prompt[:place], asked, *prompt[place + 1 :]]


def _text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(str(message["content"]) for message in prompt)


TYPE_KEYS: Final = ("kind", "options")
"""What a task has beside its answer where its row says what that is."""


def typed_by_row(question: Question, kind: GoldKind, taken: Sequence[str] = ()) -> Task:
    """The options of a multiple choice, and what the layout says the gold is; nothing where ``kind``, that of the
    environment, decides, and under names that are ``taken``."""
    if question.options:
        return {} if "options" in taken else {"options": list(question.options)}
    return {"kind": question.kind} if question.kind and kind == "symbolic" and "kind" not in taken else {}


def options_in(task: Task) -> tuple[str, ...]:
    """The options of a task; none where it is no multiple choice."""
    found = task.get("options")
    return tuple(map(str, found)) if isinstance(found, list) else ()


def kind_in(task: Task, kind: GoldKind) -> GoldKind:
    """What the gold of a task is: ``kind``, that of the environment, unless the row says another."""
    if "kind" not in task:
        return kind
    found: GoldKind = msgspec.convert(task["kind"], GoldKind)
    return found


def _is_plain(gold: Gold | None) -> bool:
    return not any(re.search(r"[\\^]", str(each)) for each in (gold if isinstance(gold, list) else [gold]))


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
