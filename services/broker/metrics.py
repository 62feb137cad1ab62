"""Prometheus metrics of the broker. Labels are closed sets."""

import math
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from prometheus_client import CollectorRegistry

from gspo_services.broker.answer_metrics import AnswerMetrics
from gspo_services.broker.ledger import ALLOWED, STATES, Ledger, groups_by_state
from gspo_services.broker.quotas import QUOTAS
from gspo_services.shared.learning import FINDINGS, LearningWatch
from gspo_services.shared.net import AUTHENTICATOR_REASONS, AuthenticatorCounters
from gspo_services.shared.runtime.process_metrics import MetricTable, counter, gauge, histogram, register_process

REFUSAL_REASONS: Final = ("undecodable", "unknown_session", "fatal", "refused", "unsendable")
DROP_REASONS: Final = ("stale", "failed")
LENGTH_BUCKETS: Final = (16, 64, 256, 1024, 4096, 16384, 65536, 262144)
SILENT: Final = "silent"
"""Status of a rollout that was not heard from for broker.lease_s: its leases have been taken back."""
ROLLOUT_STATUSES: Final = (*STATES, SILENT)
COMMIT_BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)


class BrokerMetrics(MetricTable):
    """The broker's metrics, registered once in ``registry``; ``observe`` copies the gauges from the ledger."""

    prefix = "gspo_broker_"
    messages = counter("messages_total", "Messages received, by type", "type")
    refused = counter("refused_total", "Messages refused, by type and reason", "type", "reason")
    offences = counter(
        "offences_total", "What was held against peers, by reason (docs/guide/security.md)", "reason", zeros=QUOTAS
    )
    limited = gauge(
        "limited_peers",
        "Peers and keys that have used up their quota, by what follows (docs/guide/security.md)",
        "standing",
        zeros=("slowed", "shut_out"),
    )
    refused_connections = counter(
        "refused_connections_total",
        "Connections refused or ignored, by reason (docs/guide/security.md)",
        "reason",
        zeros=AUTHENTICATOR_REASONS,
    )
    connections = counter("connections_total", "Connections accepted (TCP) and admitted (their handshake passed)", "outcome")
    messages_dropped = counter(
        "messages_dropped_total", "Messages dropped because their sender had too many waiting, by channel", "channel"
    )
    chunks = counter("chunks_total", "Chunks stored")
    tokens = counter("tokens_total", "Tokens stored")
    expert_bytes = counter("expert_bytes_total", "Bytes of experts that engines reported for sampled tokens, stored")
    leases_granted = counter("leases_granted_total", "Leases granted")
    leases_ended = counter("leases_ended_total", "LeaseEnded sent: expired, fenced, refused or dropped")
    dropped = counter("dropped_groups_total", "Groups dropped, by reason", "reason", zeros=DROP_REASONS)
    filtered = counter("filtered_groups_total", "Zero-advantage groups that dynamic sampling filtered out")
    filtered_tokens = counter("filtered_tokens_total", "Tokens of groups that dynamic sampling filtered out")
    quarantined = counter("quarantined_batches_total", "Quarantined batches: each ended its learner")
    commit_failures = counter("commit_failures_total", "Commits that failed and were tried again")
    archived_trajectories = counter(
        "archived_trajectories_total", "Trajectories whose tokens moved from the ledger into an archive file"
    )
    archived_bytes = counter("archived_bytes_total", "Bytes of archive files written")
    archive_failures = counter("archive_failures_total", "Archive files that failed and are tried again")
    commit_s = histogram("commit_seconds", "Duration of a commit", buckets=COMMIT_BUCKETS)
    trajectory_tokens = histogram(
        "trajectory_tokens",
        "Length of finished trajectories and of those in dropped groups: shows the length bias of drops",
        "outcome",
        buckets=LENGTH_BUCKETS,
        zeros=("finished", *DROP_REASONS),
    )
    queue = gauge("queue_messages", "Messages received and not yet handled")
    queue_bytes = gauge("queue_bytes", "Bytes received and not yet handled")
    leases = gauge("leases", "Leases held now")
    free = gauge("free_trajectories", "Admitted trajectories that no rollout extends now")
    groups = gauge("groups", "Training groups, by state", "state")
    outstanding = gauge("admission_groups", "Groups admitted and not yet batched or dropped")
    window = gauge("admission_limit_groups", "Most groups that may be admitted at a time")
    assembled = gauge("batches_assembled", "Batches assembled: the index of the next one")
    trained = gauge("batches_trained", "Batches that the newest weights were trained on")
    checkpointed = gauge("batches_checkpointed", "Batches covered by a checkpoint")
    version = gauge("policy_version", "Newest published policy version")
    train_reward = gauge("train_reward", "Mean reward of the last batch")
    level = gauge("ladder_level", "Level at which the tasks of a ladder are sampled", "ladder")
    reward_components = gauge(
        "train_reward_component", "Mean of each component of the last batch's rewards, without weights", "name"
    )
    eval_reward = gauge("eval_reward", "Mean reward of the last evaluation on held-out tasks")
    eval_score = gauge("eval_score", "Metrics of each evaluation set, of its last evaluation", "set", "metric")
    lag_mean = gauge("lag_mean_versions", "Mean lag of the last batch's trajectories")
    lag_max = gauge("lag_max_versions", "Largest lag of an action token of the last batch")
    max_lag = gauge("max_lag_versions", "Largest lag that may be trained on (batch.max_lag)")
    zero_advantage_groups = gauge("zero_advantage_groups", "Groups of the last batch whose rewards are all equal.")
    groups_per_batch = gauge("batch_groups", "Groups of a batch (batch.groups_per_batch)")
    wanted = gauge("batches_wanted", "Batches after which the run ends (run.num_batches)")
    quiet = gauge(
        "quiet_seconds", "Seconds since a batch was reported trained; before the first one, since this broker's start"
    )
    rollouts = gauge(
        "rollouts",
        "Rollouts by status; silent: not heard from for a lease; gone: has left",
        "status",
        zeros=ROLLOUT_STATUSES,
    )
    peers = gauge("peers", "Known sessions, by role", "role", zeros=ALLOWED)
    log_bytes = gauge("log_bytes", "Size of the ledger's write-ahead log; a reader that holds it lets it grow")
    mark_failing = gauge("mark_failing", "1 while the ledger's high-water mark cannot be written")
    damaged_rows = gauge("damaged_rows", "Rows and archive files that the last scrub found changed on the disk")
    scrubbed_rows = counter("scrubbed_rows_total", "Rows read again and compared with their checksums")
    last_scrub = gauge("last_scrub_timestamp_seconds", "Unix time at which a whole scrub ended; 0 before the first")
    database_bytes = gauge("database_bytes", "Size of the ledger's database")
    disk_free_bytes = gauge("disk_free_bytes", "Free bytes of the file system that holds the ledger")
    disk_bytes = gauge("disk_bytes", "Size of the file system that holds the ledger")
    stopping = gauge("stopping", "1 while the run stops or is finished")
    learning = gauge(
        "learning_finding",
        "1 while the newest batches show this reason why the run does not learn",
        "reason",
        zeros=FINDINGS,
    )

    def __init__(self, registry: CollectorRegistry, counted_components: Iterable[str] | None = None) -> None:
        """``counted_components``: those of the reward that count in it; None: unknown."""
        super().__init__(registry)
        self._watch = LearningWatch(counted_components)
        self.answers = AnswerMetrics(registry)
        for unknown in (self.train_reward, self.eval_reward, self.lag_mean, self.lag_max, self.zero_advantage_groups):
            # NaN until there is a batch: 0 would be a reward.
            unknown.set(math.nan)
        register_process(registry, "broker")

    def watch_disk(self, directory: Path) -> None:
        """Measure the file system of ``directory`` at each scrape, also while the ledger waits for it. NaN: it is gone."""
        self.disk_free_bytes.set_function(lambda: _disk(directory)[0])
        self.disk_bytes.set_function(lambda: _disk(directory)[1])

    @property
    def authenticator_counters(self) -> AuthenticatorCounters:
        """Where the authenticator of the broker's sockets counts."""
        return AuthenticatorCounters(
            refused=lambda reason: self.refused_connections.labels(reason).inc(),
            connections=lambda outcome: self.connections.labels(outcome).inc(),
        )

    def recall(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Take the newest lines of metrics.jsonl from before this start, or one of now, for ``learning``."""
        for line in lines:
            self._watch.take(line)
        found = {each.name for each in self._watch.findings}
        for name in FINDINGS:
            self.learning.labels(name).set(name in found)

    def count(self, line: Mapping[str, Any]) -> None:
        """Count what a new line of metrics.jsonl tells."""
        self.recall([line])
        if line["event"] == "quarantined":
            self.quarantined.inc()
        elif line["event"] == "filtered":
            self.filtered.inc()
            self.filtered_tokens.inc(sum(line["num_tokens"]))
        elif line["event"] == "dropped":
            self.dropped.labels(line["reason"]).inc()
            for num_tokens in line["num_tokens"]:
                self.trajectory_tokens.labels(line["reason"]).observe(num_tokens)

    def took(self, num_chunks: int, num_tokens: int) -> None:
        """Count chunks that are to be stored, and their tokens."""
        self.chunks.inc(num_chunks)
        self.tokens.inc(num_tokens)

    def observe(self, ledger: Ledger, queue_messages: int, queue_bytes: int, now: float) -> None:
        """Copy the ledger's state at ``now``, on the ledger's clock."""
        state = ledger.state
        self.queue.set(queue_messages)
        self.queue_bytes.set(queue_bytes)
        self.leases.set(state.groups.num_leased)
        self.free.set(state.groups.num_free)
        for name, count in groups_by_state(state).items():
            self.groups.labels(name).set(count)
        self.outstanding.set(state.groups.num_training)
        self.window.set(state.admission.max_groups)
        self.assembled.set(state.batches.num_assembled)
        self.trained.set(state.batches.num_trained)
        self.checkpointed.set(state.batches.checkpointed)
        self.version.set(state.batches.newest_version)
        for standing, number in ledger.quotas.num_limited().items():
            self.limited.labels(standing).set(number)
        for role in ALLOWED:
            self.peers.labels(role).set(len(ledger.peers.of_role(role)))
        statuses = [
            ledger.fleet.state(peer.key.peer) if now - peer.last_seen <= state.config.lease_s else SILENT
            for peer in ledger.peers.of_role("rollout")
        ] + ["gone"] * len(ledger.fleet.gone)
        for status in ROLLOUT_STATUSES:
            self.rollouts.labels(status).set(statuses.count(status))
        for name, level in state.curriculum.levels().items():
            self.level.labels(name).set(level)
        self.max_lag.set(state.admission.max_lag)
        self.groups_per_batch.set(state.config.groups_per_batch)
        self.wanted.set(state.config.num_batches)
        self.stopping.set(int(bool(state.stop_reason) or state.finished))
        last = state.batches.last
        if last is not None:
            self.train_reward.set(last.stats.mean_reward)
            self.reward_components.clear()
            for name, mean in last.stats.components.items():
                self.reward_components.labels(name).set(mean)
            self.lag_mean.set(last.stats.mean_lag)
            self.lag_max.set(last.stats.max_lag)
            self.zero_advantage_groups.set(last.stats.num_zero_advantage_groups)
            self.answers.observe(last)
        evaluated = state.evaluations.last_done
        if evaluated is not None and evaluated.reward is not None:
            self.eval_reward.set(evaluated.reward)
        for name, estimates in state.evaluations.latest.items():
            for each in estimates:
                # A rating without a maximum is not shown: its bound would look like a value.
                self.eval_score.labels(name, each.metric).set(math.nan if each.value is None else each.value)


def _disk(directory: Path) -> tuple[float, float]:
    """Free bytes and size of the file system of ``directory``."""
    try:
        usage = shutil.disk_usage(directory)
    except OSError:
        return math.nan, math.nan
    return usage.free, usage.total
