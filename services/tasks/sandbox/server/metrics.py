"""Prometheus metrics of a server of sandboxes. Declared once; the registry is passed in."""

from typing import Final

from gspo_services.shared.runtime.process_metrics import MetricTable, counter, gauge, histogram

ENDINGS: Final = ("exit", "signal", "wall", "cpu", "memory", "output", "file", "refused", "failed")
REASONS: Final = ("key", "path", "request", "busy", "draining", "failed")
RUN_BUCKETS: Final = (0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
WAIT_BUCKETS: Final = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)


class SandboxMetrics(MetricTable):
    """What a server counts."""

    prefix = "gspo_sandbox_"
    runs = counter(
        "runs_total",
        "Programs, by how they ended: by themselves (exit), by a signal, over a limit; refused: no sandbox takes it; "
        "failed: the sandbox's own fault, and the client runs it elsewhere",
        "ending",
        zeros=ENDINGS,
    )
    run_seconds = histogram("run_seconds", "Wall-clock time of a program", buckets=RUN_BUCKETS)
    wait_seconds = histogram("wait_seconds", "Time that a client waited for a sandbox it got", buckets=WAIT_BUCKETS)
    max_sandboxes = gauge("max_sandboxes", "Sandboxes that there may be at a time")
    used = gauge("used", "Sandboxes that clients have")
    waiting = gauge("waiting", "Clients that wait for a sandbox")
    turned_away = counter(
        "turned_away_total",
        "Requests for a sandbox that got none, by reason: a wrong key, an unknown path, a request that is none; busy and "
        "draining clients come again, here or elsewhere; failed: no sandbox could be started",
        "reason",
        zeros=REASONS,
    )
