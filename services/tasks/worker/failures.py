"""What went wrong in the user's code, told in the user's own files and lines."""

import asyncio
import os
import sys
import traceback
from types import FrameType
from typing import Any

MAX_DETAIL_CHARS = 2000
MAX_NAME_CHARS = 100
MAX_FRAMES = 6
HERE = os.path.dirname(os.path.abspath(__file__))
NOT_THE_USERS = (HERE, os.path.dirname(asyncio.__file__), "<frozen ")
AGENTS_FILE = os.path.join(os.sep, "gspo", "tasks", "agents.py")
_TYPE_NAME = type.__dict__["__name__"].__get__


def described(error: BaseException) -> str:
    """The error's type and text, and where in the user's files it came from, the innermost place last.

    Of many places the outermost are named as well: the innermost may all be in a library that the user calls. Never raises:
    an error's class is the user's own code, too.
    """
    try:
        # The first error of a group says more than the group.
        error, groups = _first_of(error)
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
        if len(frames) > MAX_FRAMES:
            frames = [*frames[: MAX_FRAMES // 2], *frames[-MAX_FRAMES // 2 :]]
        places = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in frames]
        return cut("\n".join([groups + said(error), *places]))
    except BaseException:  # noqa: BLE001 - an error that lies about what is in it
        return said(error)


def said(error: BaseException) -> str:
    """The error's type and text. Never raises."""
    try:
        return cut("".join(traceback.format_exception_only(type(error), error)).strip())
    except BaseException:  # noqa: BLE001 - an error that may not even print
        return cut(kind_of(error))


def _first_of(error: BaseException) -> "tuple[BaseException, str]":
    groups = ""
    for _ in range(MAX_FRAMES):
        inner = getattr(error, "exceptions", None)
        if not (isinstance(inner, (tuple, list)) and inner and isinstance(inner[0], BaseException)):
            break
        error, groups = inner[0], f"{groups}{kind_of(error)}: "
    return error, groups


def is_a(error: BaseException, kinds: Any) -> bool:
    """As ``isinstance``, which would ask the error itself what class it has."""
    return issubclass(type(error), kinds)


def kind_of(value: Any) -> str:
    """The name of a value's type, past everything that a class of the user's may have put in its place."""
    name: str = _TYPE_NAME(type(value))
    return name[:MAX_NAME_CHARS]


def place_of(frame: "FrameType | None") -> str:
    """Where the user's code stands, outermost first: what a thread is in that does not come back."""
    places = []
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            places.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return cut("\n".join(reversed(places[:MAX_FRAMES])))


def is_users(filename: str) -> bool:
    """Whether a file is neither a worker's nor asyncio's."""
    return not filename.startswith(NOT_THE_USERS) and not filename.endswith(AGENTS_FILE)


def cut(text: str) -> str:
    """``text`` in valid Unicode and of bounded length. The end of a long one is left out."""
    return text[:MAX_DETAIL_CHARS].encode("utf-8", "replace").decode()


def explained_import(error: BaseException, function: str) -> str:
    """Why ``function`` cannot be had, and where it was looked for."""
    if isinstance(error, ModuleNotFoundError):
        return cut(f'"{function}": {described(error)}\n(Python {sys.executable}, working directory {os.getcwd()})')
    return cut(f'"{function}": {described(error)}')
