"""The program in a policy's answer: the last fenced block in a language that is asked for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from gspo_services.tasks.environments.programs.toolchains import Toolchain, language_of

_FENCE: Final = re.compile(r"(?P<indent>[ \t]*)(?P<run>`{3,}|~{3,})(?P<info>.*)")


class AnsweredProgram(NamedTuple):
    """A program and its language."""

    source: str
    language: str


class _Block(NamedTuple):
    """What stands between two fences, and what the first of them says of it."""

    source: str
    tag: str
    """In lower case; "" for a fence that names nothing."""


def program_in(answer: str, allowed: Mapping[str, Toolchain], *, unfenced: bool = False) -> AnsweredProgram | None:
    """The last complete block whose fence names one of the ``allowed`` languages; None without a program.

    Where no fence names one, the last block without a name is the program, in the first of the languages. So a sample output
    or a command line behind the program is not taken for it. With ``unfenced`` an answer without any fence is the program.

    A block that is never closed was cut off, and is none. A thought is no answer: what stands before the last ``</think>``,
    or behind a ``<think>`` that is never closed, is not read.
    """
    said = _without_thought(answer)
    unnamed: AnsweredProgram | None = None
    for block in reversed(list(_blocks(said))):
        language = language_of(block.tag, allowed)
        if language is not None and block.tag:
            return AnsweredProgram(block.source, language)
        if language is not None and unnamed is None:
            unnamed = AnsweredProgram(block.source, language)
    if unnamed is None and unfenced and said.strip() and not any(_opening(line) for line in said.splitlines()):
        return AnsweredProgram(said.strip() + "\n", next(iter(allowed)))
    return unnamed


def _without_thought(answer: str) -> str:
    return answer.rpartition("</think>")[2].partition("<think>")[0]


def _blocks(text: str) -> Iterator[_Block]:
    """The complete blocks, in their order."""
    opened: re.Match[str] | None = None
    lines: list[str] = []
    for line in text.splitlines():
        fence = _opening(line)
        if fence is None or (opened is not None and not _may_close(opened, fence)):
            lines.append(line)
        elif opened is not None and not fence["info"].strip():
            indent = len(opened["indent"])
            yield _Block("\n".join(_outdented(each, indent) for each in lines) + "\n", opened["info"].strip().lower())
            opened = None
        else:
            # A fence that names something opens a block: the one before was never closed.
            opened, lines = fence, []


def _opening(line: str) -> re.Match[str] | None:
    """A line that is a fence; behind one of backticks there is none, or it is code within a line."""
    found = _FENCE.fullmatch(line)
    return None if found is None or (found["run"][0] == "`" and "`" in found["info"]) else found


def _may_close(opened: re.Match[str], fence: re.Match[str]) -> bool:
    return opened["run"][0] == fence["run"][0] and len(opened["run"]) <= len(fence["run"])


def _outdented(line: str, indent: int) -> str:
    """A line of a block that stands in a list, without the indentation of its fence."""
    return line[min(indent, len(line) - len(line.lstrip(" \t"))) :]
