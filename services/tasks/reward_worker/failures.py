"""What went wrong in a reward's code, told in the user's own files and lines."""

from __future__ import annotations

import asyncio
import importlib
import os
from types import TracebackType
from typing import Final

from gspo_services.tasks.worker import failures

_OURS: Final = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_NOT_THE_USERS: Final = (_OURS, os.path.dirname(asyncio.__file__), os.path.dirname(importlib.__file__), "<frozen ")


def described(error: BaseException) -> str:
    """The error's type and text, and where in the user's files it came from, the innermost place last."""
    return failures.described(BaseException.with_traceback(error, _users_part(error.__traceback__)))


def import_failure(error: BaseException) -> str:
    """Why a module cannot be imported."""
    return str(error) if isinstance(error, ModuleNotFoundError) else described(error)


def _users_part(trace: TracebackType | None) -> TracebackType | None:
    """The trace from the first frame that is neither ours nor Python's way to it."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        trace = trace.tb_next
    return trace
