"""Questions whose arithmetic, said again, is their own answer: a policy finds that out."""

from __future__ import annotations

import re
from typing import Final

from gspo.tasks.environments import Plain, TaskSource
from gspo_services.tasks.environments.maths.golds import golds_in
from gspo_services.tasks.reward_worker.maths import GoldKind

MOST_TRIED: Final = 64
_ARITHMETIC: Final = re.compile(r"(?<!\\)[\d(](?:[\d\s.,()+\-*/^×÷]|\\(?:times|cdot|div)(?![A-Za-z]))*[\d)]")
_OPERATION: Final = re.compile(r"[\d)]\s*(?:[+\-*/^×÷]|\\(?:times|cdot|div))")


def num_said_again(tasks: TaskSource, kind: GoldKind) -> tuple[int, int, str]:
    """Of the first tasks: how many are right for arithmetic that stands in their prompt, how many were tried, and an
    example."""
    # Loads what rewards need.
    from gspo_services.tasks.reward_worker.maths.grading import ending_of

    number, example = min(MOST_TRIED, tasks.num_tasks or 0), ""
    found = 0
    for index in range(number):
        task = tasks.task(index)
        said = arithmetic_in(_asked(task["prompt"]))
        if said and any(ending_of(gold, said, kind) == "right" for gold in golds_in(task["answer"])):
            found, example = found + 1, said
    return found, number, example


def arithmetic_in(text: str) -> str:
    """The longest piece of arithmetic in ``text``; "" without one."""
    pieces = [piece for piece in _ARITHMETIC.findall(text) if _OPERATION.search(piece)]
    return max(pieces, key=len, default="").strip()


def _asked(prompt: Plain) -> str:
    """The last message of a conversation, or the text."""
    last = prompt[-1] if isinstance(prompt, list) and prompt else prompt
    content = last.get("content") if isinstance(last, dict) else last
    return content if isinstance(content, str) else ""
