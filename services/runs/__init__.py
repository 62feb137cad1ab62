"""Runs, live or ended: read, audited, replayed, exported, compared, backed up, viewed, evaluated, tracked.

Scripts and notebooks start, watch and read them from here:

    from gspo_services.runs import Run

    run = Run.open("runs/arithmetic")
    print(run.evaluations()[-1].reward)

See docs/guide/python.md.

Each name is loaded when it is first used. The names need the packages of a run (``pip install 'gspo[services]'``), and an
import without these packages says so.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gspo_services.runs.metrics import BatchMetrics, HeldOut, RunEvent
    from gspo_services.runs.reading import RecordedGroup, RecordedTokens, RecordedTrajectory
    from gspo_services.runs.scripting import RunFailed
    from gspo_services.runs.scripting import TrainingRun as Run

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

_READING, _METRICS, _SCRIPTING = "gspo_services.runs.reading", "gspo_services.runs.metrics", "gspo_services.runs.scripting"
_PLACES = {
    "BatchMetrics": (_METRICS, "BatchMetrics"),
    "HeldOut": (_METRICS, "HeldOut"),
    "RecordedGroup": (_READING, "RecordedGroup"),
    "RecordedTokens": (_READING, "RecordedTokens"),
    "RecordedTrajectory": (_READING, "RecordedTrajectory"),
    "Run": (_SCRIPTING, "TrainingRun"),
    "RunEvent": (_METRICS, "RunEvent"),
    "RunFailed": (_SCRIPTING, "RunFailed"),
}


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module 'gspo_services.runs' has no attribute {name!r}")
    module, own = _PLACES[name]
    try:
        return getattr(import_module(module), own)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"gspo_services.runs.{name} needs the packages of a run, but {error.name} is not installed: "
            "pip install 'gspo[services]'"
        ) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
