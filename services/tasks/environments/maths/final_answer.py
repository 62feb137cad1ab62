"""The final answer in a text: in the last box, behind the last marker, or what its last line says."""

from __future__ import annotations

import re
from typing import Final, Literal

from gspo.tasks.maths import MAX_ANSWER_CHARS, is_mathematics

AnswerForm = Literal["boxed", "marked", "either"]
"""Where an answer stands: in \\boxed{...}; behind the marker, on the same line; in a box, or behind the marker without
one."""
ANSWER_TAG: Final = "<answer>"
"""R1's and TinyZero's marker, which has an end."""
_BOX: Final = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
MAX_BOXES: Final = 50
"""The last ones, which are looked at: a text of nothing but open boxes would take seconds."""
_VERB: Final = re.compile(r".*(?:\b(?:is|are|equals|be)\b|:(?=\s))\s*(.+)", re.DOTALL)
_FORMULA: Final = re.compile(r"\$+([^$]+)\$+|\\\((.+?)\\\)|\\\[(.+?)\\\]")
# Not the 2 of CO2 or x^2: that is no number that anybody states.
_LONE_NUMBER: Final = re.compile(r"[^\d]*?(?<![\w^])(-?\d[\d,]*(?:\.\d+)?(?:/\d+)?)[^\d]*")
_DOUBT: Final = re.compile(r"\b(?:or|and|not|either|neither|maybe)\b|n't\b")


def stated_answer(text: str, form: AnswerForm, marker: str) -> str | None:
    """The answer, without its box; None when there is none."""
    found = None
    if form != "marked":
        found = last_boxed(text)
    if found is None and form != "boxed" and marker in text:
        found = _behind(text, marker).partition("\n")[0].strip()
        # "Answer: \boxed{7}" and "Answer: $7$." mean 7.
        found = last_boxed(found) or found.rstrip(".$* ").lstrip("$* ")
    return found if found and len(found) <= MAX_ANSWER_CHARS else None


def said_answer(text: str, marker: str) -> str | None:
    """The answer of a policy that was asked for a marker, or for the answer alone (marker "").

    It is what stands behind the marker; without one, what is in the last box; without either, what the last line says.
    """
    if marker and marker in text:
        behind = _behind(text, marker)
        found = last_boxed(behind) or behind.partition("\n")[0].strip()
    else:
        found = last_boxed(text) or _said_in_prose(text)
    return found if found and len(found) <= MAX_ANSWER_CHARS else None


def _behind(text: str, marker: str) -> str:
    """What stands behind the last marker; between tags, what they hold."""
    behind = text.rpartition(marker)[2]
    return (behind.partition("</answer>")[0] if marker.lower() == ANSWER_TAG else behind).strip()


def _said_in_prose(text: str) -> str:
    """The one answer of the last line, as in "The profit is $70,000."; the whole text where it is one."""
    text = text.strip()
    if len(text) <= MAX_ANSWER_CHARS and is_mathematics(text):
        return text
    line = text.splitlines()[-1].strip() if text else ""
    return _of_line(line) if len(line) <= MAX_ANSWER_CHARS else ""


def _of_line(line: str) -> str:
    candidates = [line]
    if said := _VERB.fullmatch(line):
        candidates.append(said[1])
    formulas = _FORMULA.findall(line)
    if len(formulas) == 1:
        candidates.append("".join(formulas[0]))
    lone = _LONE_NUMBER.fullmatch(line)
    if lone and not _DOUBT.search(line):
        candidates.append(lone[1])
    return next((each for each in candidates if is_mathematics(each)), candidates[1] if said else line)


def last_boxed(text: str) -> str | None:
    """What stands in the last \\boxed{...} whose braces are closed; None without one."""
    for box in reversed(list(_BOX.finditer(text))[-MAX_BOXES:]):
        inside = _in_braces(text, box.end())
        if inside is not None:
            return inside.strip()
    return None


def _in_braces(text: str, begin: int) -> str | None:
    depth = 0
    escaped = False
    for place in range(begin, min(len(text), begin + MAX_ANSWER_CHARS + 2)):
        character = text[place]
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = True
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return text[begin + 1 : place]
    return None
