"""Prometheus metrics of a broker with a database: who leads, and how far a standby is behind."""

from gspo_services.shared.runtime.process_metrics import MetricTable, gauge


class LeadershipMetrics(MetricTable):
    """Registered once in ``registry``."""

    prefix = "gspo_broker_"
    leads = gauge("leads", "1 while this broker leads the run, 0 while it is a standby")
    commits_behind = gauge("standby_commits_behind", "Commits that a standby found at its last look")
    leader_silent_s = gauge("leader_silent_seconds", "How long a standby has not seen the leader renew its place")
