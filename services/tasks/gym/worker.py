"""``python -P -m gspo_services.tasks.gym.worker``: answers one request a line, as JSON, until its input ends."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, Final

import msgspec

from gspo_services.tasks.gym.asking import Generator, GymRefused

LONGEST_S: Final = 600
"""A request that takes longer ends the process, whose parent may be gone."""
MISSING: Final = "reasoning-gym is not installed here: pip install 'reasoning-gym>=0.1.25,<0.2' ({})"


def main() -> None:
    """Serve until the parent goes away."""
    # What the package prints must not pass for an answer.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for line in sys.stdin.buffer:
        signal.alarm(LONGEST_S)
        try:
            answer = {"answer": _answer(json.loads(line))}
        except GymRefused as error:
            answer = {"refused": str(error)}
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()
        signal.alarm(0)


def _answer(request: dict[str, Any]) -> Any:
    try:
        from gspo_services.tasks.gym import library, package  # seconds
    except ImportError as error:
        raise GymRefused(MISSING.format(error)) from error
    generator = msgspec.convert(request.get("generator", {"name": ""}), Generator)
    questions: dict[str, Callable[[], Any]] = {
        "version": lambda: package.VERSION,
        "names": library.generator_names,
        "levels": lambda: library.levels(generator),
        "draw": lambda: library.draw(generator, request["level"], request["number"]),
    }
    return questions[request["do"]]()


if __name__ == "__main__":
    main()
