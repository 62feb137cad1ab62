"""Describes errors in the user's code, with files and lines."""

import asyncio
import importlib
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from gspo_protocol import limits
from gspo_services.shared.runtime.errors import ConfigurationError

_OURS: Final = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_NOT_THE_USERS: Final = (
    os.path.join(_OURS, ""),
    os.path.join(os.path.dirname(os.path.abspath(limits.__file__)), ""),
    os.path.join(os.path.dirname(asyncio.__file__), ""),
    os.path.join(os.path.dirname(importlib.__file__), ""),
    "<frozen ",
)
_MOST_FRAMES: Final = 6


def places_of(error: BaseException) -> list[str]:
    """Where in the user's files ``error`` came from, the innermost place last; empty when it is not from there."""
    try:
        trace = traceback.extract_tb(error.__traceback__)
    except BaseException:  # noqa: BLE001 - the error's class is the user's own code, too
        return []
    frames = [each for each in trace if not each.filename.startswith(_NOT_THE_USERS)]
    if len(frames) > _MOST_FRAMES:
        # The user's own ones and those of the error: between them may be many of a library.
        frames = [*frames[: _MOST_FRAMES // 2], *frames[-_MOST_FRAMES // 2 :]]
    return [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in frames]


def told(error: BaseException) -> str:
    """The text of a failed episode, with the places of the environment's error that has caused it. Agents' have theirs."""
    text, cause = str(error), error.__cause__
    places = places_of(cause) if cause is not None and text.startswith("environment ") else []
    return "\n".join([text, *places])


@contextmanager
def of_the_configuration(what: str) -> Iterator[None]:
    """Whatever the user's code raises inside becomes a ConfigurationError about ``what``, with its places."""
    try:
        yield
    except ConfigurationError:
        raise
    except Exception as error:
        places = places_of(error)
        kind = "" if isinstance(error, ValueError | OSError) and not places else f"{type(error).__name__}: "
        raise ConfigurationError("\n".join([f"{what}: {kind}{error}", *places])) from error
