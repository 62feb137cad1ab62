"""Runs from Python: scripts and notebooks start, watch and read them, without an event loop.

    from gspo.runs import Run

    run = Run.open("runs/arithmetic")
    print(run.evaluations()[-1].reward)

docs/guide/python.md shows more. A door: what it gives is in the services of this project, so an import needs their packages
(``pip install 'gspo[services]'``), and without them is an ImportError that says so.
"""

from __future__ import annotations

from gspo.extras import needs_extras

with needs_extras(__name__, "services"):
    from gspo_services.broker.store import NoLedger, StoreCorrupt
    from gspo_services.runs.metrics import BatchMetrics, Event, HeldOut, RunEvent
    from gspo_services.runs.reading import RecordedGroup, RecordedTokens, RecordedTrajectory
    from gspo_services.runs.scripting import RunFailed
    from gspo_services.runs.scripting import TrainingRun as Run
    from gspo_services.shared.runtime.errors import ConfigurationError, ServiceError

__all__ = [
    "BatchMetrics",
    "ConfigurationError",
    "Event",
    "HeldOut",
    "NoLedger",
    "RecordedGroup",
    "RecordedTokens",
    "RecordedTrajectory",
    "Run",
    "RunEvent",
    "RunFailed",
    "ServiceError",
    "StoreCorrupt",
]
