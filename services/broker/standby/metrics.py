"""Prometheus metrics of a broker with a database: who leads, and how far a standby is behind."""

from prometheus_client import CollectorRegistry, Gauge


class LeadershipMetrics:
    """Registered once in ``registry``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"gspo_broker_{name}", text, registry=registry)

        self.leads = gauge("leads", "1 while this broker leads the run, 0 while it is a standby")
        self.commits_behind = gauge("standby_commits_behind", "Commits that a standby found at its last look")
        self.leader_silent_s = gauge("leader_silent_seconds", "How long a standby has not seen the leader renew its place")
