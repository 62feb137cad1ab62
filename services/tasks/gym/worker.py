"""``python -P -m gspo_services.tasks.gym.worker``: answers one request after the other, until its parent ends."""

from __future__ import annotations

import queue
import signal
from collections.abc import Callable
from typing import Any, Final

import msgspec

from gspo_services.tasks.gym.asking import Generator, GymRefused
from gspo_services.tasks.worker.frames import FrameSocket

LONGEST_S: Final = 600
"""A request that takes longer ends the process: its parent may be gone, and its threads held up by the package."""
MISSING: Final = "reasoning-gym is not installed here: pip install 'reasoning-gym>=0.1.25,<0.2' ({})"


def main() -> None:
    """Serve until the parent goes away."""
    frames = FrameSocket()
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    frames.listen(requests.put)
    while True:
        request = requests.get()
        signal.alarm(LONGEST_S)
        try:
            answer = {"answer": _answer(request)}
        except GymRefused as error:
            answer = {"refused": str(error)}
        frames.send(answer)
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
