"""Runs from Python: start, watch and read them in a script or a notebook.

    from gspo.runs import Run

    run = Run.open("runs/arithmetic")
    print(run.evaluations()[-1].reward)

See docs/guide/everyday/python.md.

Why here: a user's own project often has packages called ``services`` and ``protocol``, and in a wheel ours have other
names. ``gspo`` is the only name that is the same everywhere. Why so: ``gspo`` is a library that needs only numpy and torch,
and imports none of the services. So this module names them without loading them. Whoever asks for one of the names below
needs what a run needs (``pip install 'gspo[services]'``), and gets a clear error without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.runs.reading import RecordedGroup, RecordedTokens, RecordedTrajectory
    from services.runs.record import HeldOut
    from services.runs.scripting import BatchMetrics, RunEvent, RunFailed
    from services.runs.scripting import TrainingRun as Run

__all__ = [
    "BatchMetrics",
    "HeldOut",
    "RecordedGroup",
    "RecordedTokens",
    "RecordedTrajectory",
    "Run",
    "RunEvent",
    "RunFailed",
]

_READING, _RECORD, _SCRIPTING = "services.runs.reading", "services.runs.record", "services.runs.scripting"
_PLACES = {
    "BatchMetrics": (_SCRIPTING, "BatchMetrics"),
    "HeldOut": (_RECORD, "HeldOut"),
    "RecordedGroup": (_READING, "RecordedGroup"),
    "RecordedTokens": (_READING, "RecordedTokens"),
    "RecordedTrajectory": (_READING, "RecordedTrajectory"),
    "Run": (_SCRIPTING, "TrainingRun"),
    "RunEvent": (_SCRIPTING, "RunEvent"),
    "RunFailed": (_SCRIPTING, "RunFailed"),
}


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module 'gspo.runs' has no attribute {name!r}")
    module, own = _PLACES[name]
    try:
        return getattr(import_module(module), own)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"gspo.runs.{name} needs the packages of a run, and {error.name} is not installed: pip install 'gspo[services]'"
        ) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
