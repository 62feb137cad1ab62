"""What a question is about, where a row has it in a column of its own: passages, contexts, inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

PASSAGE_COLUMNS: Final = (
    "context", "Context", "passage", "Passage", "article", "story", "paragraph", "paragraphs", "document", "documents",
    "background", "puzzle",
)  # fmt: skip
"""Shown before the question."""
BESIDE_DISTRACTORS: Final = "support"
"""SciQ's passage."""
INPUT: Final = ("instruction", "input")
"""Alpaca's input is shown after its instruction."""


def passage_columns(record: Mapping[str, Any], prompt: str, named: tuple[str, ...]) -> tuple[str, ...]:
    """The columns that are shown beside ``prompt`` where they say something; ("auto",) finds them.

    Raises: ValueError for a column that is named and not there.
    """
    if named != ("auto",):
        if missing := next((name for name in named if name not in record), None):
            raise ValueError(
                f'no column "{missing}": there are {", ".join(sorted(map(str, record)))[:300]} (context_columns)'
            )
        names = named
    else:
        names = (*PASSAGE_COLUMNS, *([BESIDE_DISTRACTORS] if "distractor1" in record else []))
        names += INPUT[1:] if prompt == INPUT[0] else ()
    return tuple(name for name in names if name != prompt and name in record)


def passage_of(value: Any, column: str) -> str:
    """The text of a passage, "" for none; HotpotQA's has paragraphs of titles and sentences. Raises: ValueError."""
    if value in (None, "", [], {}):
        return ""
    if isinstance(value, Mapping) and {"title", "sentences"} <= value.keys():
        value = list(zip(value["title"], value["sentences"], strict=False))
    if isinstance(value, list) and value:
        return "\n\n".join(_paragraph(each, column) for each in value)
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return str(value).strip()
    raise _unknown(value, column)


def _paragraph(value: Any, column: str) -> str:
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, Mapping):
        text = value.get("paragraph_text", value.get("text", value.get("content")))
        if isinstance(text, str):
            return "\n".join(filter(None, (str(value.get("title") or "").strip(), text.strip())))
    if isinstance(value, (list, tuple)) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], list):
        return f"{value[0].strip()}\n" + " ".join(str(sentence).strip() for sentence in value[1])
    raise _unknown(value, column)


def _unknown(value: Any, column: str) -> ValueError:
    return ValueError(
        f'column "{column}" looks like a part of the question, and is {repr(value)[:100]}: expected text, or paragraphs; '
        "name the columns that are shown in context_columns, [] for none"
    )
