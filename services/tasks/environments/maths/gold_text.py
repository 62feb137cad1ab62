"""The answer that a row gives: out of its list, from behind its marker, out of its box."""

from __future__ import annotations

import math
import re
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any, Final, NamedTuple

import msgspec

from gspo_services.tasks.environments.maths.final_answer import last_boxed
from gspo_services.tasks.environments.maths.layouts import GSM8K_MARKER, is_marked

Gold = str | list[Any]
"""One answer, or several texts of which each is right."""
_WORD: Final = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_COMMAND: Final = re.compile(r"\\text\s*\{[^{}]*\}|\\[A-Za-z]+")


class GoldReading(NamedTuple):
    """How the answer in a column is written."""

    column: str
    marker: str
    """What it stands behind; "auto" finds out, "" takes all."""
    is_solution: bool
    """The column may hold a whole solution."""
    compared: bool
    """As mathematics, and not by a reward of the user's own, which gets the text as it is."""


def gold_in(value: Any, reading: GoldReading) -> Gold:
    """The answer in the ``value`` of a column. Raises: ValueError that names the column and the value."""
    several = _several(value) if reading.compared or isinstance(value, (list, dict)) else None
    if several is None:
        return _one(value, reading)
    if not several:
        raise ValueError(f'column "{reading.column}" is an empty list, and has no answer')
    golds = list(dict.fromkeys(_one(each, reading) for each in several))
    return golds[0] if len(golds) == 1 and reading.compared else golds


def _several(value: Any) -> list[Any] | None:
    """The answers of a list, of SQuAD's and TriviaQA's maps of them, or of a JSON text of a list of texts; both words for a
    truth value (BoolQ). None for one answer, such as the interval [0, 1]."""
    if isinstance(value, bool):
        return ["yes", "true"] if value else ["no", "false"]
    if isinstance(value, dict) and isinstance(value.get("value"), str) and isinstance(value.get("aliases"), list):
        return [value["value"], *value["aliases"]]
    if isinstance(value, dict):
        value = value.get("text", value.get("spans"))
    if isinstance(value, list):
        return value
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            return msgspec.json.decode(value, type=list[str])
        except (msgspec.MsgspecError, UnicodeError):
            return None
    return None


def _one(value: Any, reading: GoldReading) -> str:
    column, marker, compared = reading.column, reading.marker, reading.compared
    text = answer_text(value, column)
    if marker == "auto":
        text = _found(text, reading) if compared else text.rpartition(GSM8K_MARKER)[2]
    elif marker:
        _, found, text = text.rpartition(marker)
        if not found:
            raise ValueError(f'no answer after "{marker}" in column "{column}"')
    text = text.strip()
    if compared and len(text) > 2 and text[0] == text[-1] == "$" and "$" not in text[1:-1]:
        text = text[1:-1].strip()
    if not text:
        raise ValueError(f'column "{column}" has no answer: {str(value)[-100:]!r}')
    if compared and text.startswith('{"'):
        raise ValueError(
            f'column "{column}" holds JSON ({text[:50]!r}), not an answer: tests of programs are for the environment "code"'
        )
    return text


def _found(text: str, reading: GoldReading) -> str:
    """Raises: ValueError for a solution in words that does not say what its answer is."""
    if is_marked(text):
        text = text.rpartition(GSM8K_MARKER)[2]
        return last_boxed(text) or text
    boxed = last_boxed(text)
    if boxed is None and reading.is_solution and len(_WORD.findall(_COMMAND.sub("", text))) > 1:
        raise ValueError(
            f'column "{reading.column}" has no \\boxed{{...}} with an answer: name the column of answers in answer_column, '
            "or say in gold_marker what the answer stands behind"
        )
    return text if boxed is None else boxed


def answer_text(value: Any, column: str) -> str:
    """Raises: ValueError for what is neither text nor a number nor a date, and for nothing."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Decimal) and value.is_finite():
        return f"{value:f}"
    if isinstance(value, (date, time)):
        # Parquet has dates as moments, too.
        plain = value.date() if isinstance(value, datetime) and value.time() == time() else value
        return str(plain).removesuffix(":00") if isinstance(value, (datetime, time)) else str(plain)
    if not isinstance(value, (str, int, float)):
        raise ValueError(f'column "{column}" is {repr(value)[:100]}, not an answer')
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f'column "{column}" is {value}, not a number that can be an answer')
        value = int(value) if value.is_integer() else value
    text = str(value).strip()
    if not text:
        raise ValueError(f'column "{column}" is empty: the row has no answer')
    return text
