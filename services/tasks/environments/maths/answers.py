"""The final answer in a text: in the last box, or behind the last marker."""

from __future__ import annotations

import re
from typing import Final, Literal

AnswerForm = Literal["boxed", "marked", "either"]
"""Where an answer stands: in \\boxed{...}; behind the marker, on the same line; in a box, or behind the marker without
one."""
_BOX: Final = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
MAX_BOXES: Final = 50
"""The last ones, which are looked at: a text of nothing but open boxes would take seconds."""
MAX_ANSWER_CHARS: Final = 2_000
"""A longer one is no answer: reading it would only take time."""


def stated_answer(text: str, form: AnswerForm, marker: str) -> str | None:
    """The answer, without its box; None when there is none."""
    found = None
    if form != "marked":
        found = last_boxed(text)
    if found is None and form != "boxed" and marker in text:
        found = text.rpartition(marker)[2].strip().partition("\n")[0].strip()
        # "Answer: \boxed{7}" and "Answer: $7$." mean 7.
        found = last_boxed(found) or found.rstrip(".$* ").lstrip("$* ")
    return found if found and len(found) <= MAX_ANSWER_CHARS else None


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
