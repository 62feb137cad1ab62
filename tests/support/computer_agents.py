"""Agents with a computer, for tests: each does what its task's list "script" says."""

from typing import Any

from gspo.tasks.agents import ComputerError, Episode


async def play(episode: Episode) -> float:
    """What came out of each is the step "told"."""
    said: list[Any] = []
    for name, *arguments in episode.task["script"]:
        try:
            result: Any = await getattr(episode.computer, name)(*arguments)
        except ComputerError as error:
            result = f"refused: {error}"
        said.append(_plain(result))
    await episode.step("told", lambda: said)
    return 1.0


def play_in_thread(episode: Episode) -> float:
    """The same in a plain function."""
    said = [_plain(getattr(episode.computer, f"{name}_now")(*rest)) for name, *rest in episode.task["script"]]
    episode.step_now("told", lambda: said)
    return 1.0


def _plain(result: Any) -> Any:
    return list(result) if isinstance(result, tuple) else result.decode() if isinstance(result, bytes) else result
