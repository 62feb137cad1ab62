"""The program in a policy's answer: what stands in the last fenced block."""

from __future__ import annotations

from typing import NamedTuple


class AnsweredProgram(NamedTuple):
    """A program and what its fence calls its language."""

    source: str
    tag: str
    """In lower case; "" for a fence that names none, and for text without a fence."""


def program_in(answer: str, *, unfenced: bool = False) -> AnsweredProgram | None:
    """The last complete block between two lines of ```; None without one.

    With ``unfenced`` an answer without any fence is the program itself. A block that is never closed was cut off, and is
    none.
    """
    found: AnsweredProgram | None = None
    tag: str | None = None
    block: list[str] = []
    fences = 0
    for line in answer.splitlines():
        mark = line.strip()
        if not mark.startswith("```"):
            block.append(line)
            continue
        fences += 1
        if tag is None:
            tag, block = mark.strip("`").strip().lower(), []
        elif mark.strip("`"):
            # A fence with a language opens a block: the one before was never closed.
            tag, block = mark.strip("`").strip().lower(), []
        else:
            found, tag = AnsweredProgram("\n".join(block) + "\n", tag), None
    if found is None and unfenced and not fences and answer.strip():
        return AnsweredProgram(answer.strip() + "\n", "")
    return found
