"""Prometheus metrics of a server of sandboxes. Declared once; the registry is passed in."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

ENDINGS = ("exit", "signal", "wall", "cpu", "memory", "output", "file", "refused", "failed")
REASONS = ("key", "path", "request", "busy", "draining", "failed")


class SandboxMetrics:
    """What a server counts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.runs = Counter(
            "gspo_sandbox_runs_total",
            "Programs, by how they ended: by themselves (exit), by a signal, over a limit; refused: no sandbox takes it; "
            "failed: the sandbox's own fault, and the client runs it elsewhere",
            ["ending"],
            registry=registry,
        )
        self.run_seconds = Histogram(
            "gspo_sandbox_run_seconds",
            "Wall-clock time of a program",
            buckets=(0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
            registry=registry,
        )
        self.wait_seconds = Histogram(
            "gspo_sandbox_wait_seconds",
            "Time that a client waited for a box it got",
            buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
            registry=registry,
        )
        self.places = Gauge("gspo_sandbox_places", "Boxes that there may be at a time", registry=registry)
        self.used = Gauge("gspo_sandbox_used_places", "Boxes that clients have", registry=registry)
        self.waiting = Gauge("gspo_sandbox_waiting", "Clients that wait for a box", registry=registry)
        self.turned_away = Counter(
            "gspo_sandbox_turned_away_total",
            "Requests for a box that got none, by reason: a wrong key, an unknown path, a request that is none; busy and "
            "draining clients come again, here or elsewhere; failed: no box could be started",
            ["reason"],
            registry=registry,
        )
        # rate() and increase() miss the first event of a counter that does not exist before it.
        for ending in ENDINGS:
            self.runs.labels(ending=ending)
        for reason in REASONS:
            self.turned_away.labels(reason=reason)
