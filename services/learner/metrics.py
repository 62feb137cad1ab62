"""Prometheus metrics of the learner. Declared once; the registry is passed in."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from gspo_services.shared.net import AUTHENTICATOR_REASONS, AuthenticatorCounters
from gspo_services.shared.runtime.process_metrics import register_process


class LearnerMetrics:
    """The metrics that rank 0 of the learner exports."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.batches = Counter("gspo_learner_batches_total", "Batches trained", registry=registry)
        self.tokens = Counter("gspo_learner_tokens_total", "Tokens trained on, observations included", registry=registry)
        self.trajectories = Counter("gspo_learner_trajectories_total", "Trajectories trained on", registry=registry)
        self.policy_version = Gauge("gspo_learner_policy_version", "Newest published policy version", registry=registry)
        self.next_batch = Gauge("gspo_learner_next_batch", "Index of the next batch", registry=registry)
        self.train_seconds = Histogram(
            "gspo_learner_batch_seconds",
            "Time to train one batch",
            buckets=(0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000),
            registry=registry,
        )
        self.wait_seconds = Counter("gspo_learner_wait_seconds_total", "Time spent waiting for batches", registry=registry)
        self.has_device = Gauge(
            "gspo_learner_has_device", "1 while the learner may use the device, with run.take_turns", registry=registry
        )
        self.device_turns = Counter("gspo_learner_device_turns_total", "Turns on the device that began", registry=registry)
        self.device_wait_seconds = Counter(
            "gspo_learner_device_wait_seconds_total", "Time spent waiting for the rollout's turn to end", registry=registry
        )
        self.publish_seconds = Histogram(
            "gspo_learner_publish_seconds", "Time that training waited for a version to be copied", registry=registry
        )
        self.announce_seconds = Histogram(
            "gspo_learner_announce_seconds",
            "Time from the copy of a version to its announcement, during training: digests, delta",
            buckets=(0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
            registry=registry,
        )
        self.checkpoint_seconds = Histogram(
            "gspo_learner_checkpoint_seconds", "Time that training waited for a checkpoint", registry=registry
        )
        self.checkpoint_write_seconds = Histogram(
            "gspo_learner_checkpoint_write_seconds",
            "Time from the start of a checkpoint until a learner could resume from it",
            buckets=(0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000),
            registry=registry,
        )
        self.damaged_checkpoint_files = Gauge(
            "gspo_learner_damaged_checkpoint_files",
            "Files of checkpoints that were not what was written when they were last read",
            registry=registry,
        )
        self.weight_bytes_sent = Counter(
            "gspo_learner_weight_bytes_sent_total", "Bytes of weights sent to rollouts", registry=registry
        )
        self.weight_sources_failed = Counter(
            "gspo_learner_weight_sources_failed_total",
            "Rollouts that were referred to another rollout for weights and came back to the learner",
            registry=registry,
        )
        self.weight_loads = Counter(
            "gspo_learner_weight_loads_total", "Versions that an engine loaded and verified", registry=registry
        )
        self.weight_loads_failed = Counter(
            "gspo_learner_weight_loads_failed_total", "Versions that an engine did not load", registry=registry
        )
        self.messages_refused = Counter(
            "gspo_learner_messages_refused_total", "Messages that the learner refused", ["channel"], registry=registry
        )
        self.refused_connections = Counter(
            "gspo_learner_refused_connections_total",
            "Connections to the weight server refused or ignored, by reason (docs/guide/security.md)",
            ["reason"],
            registry=registry,
        )
        self.connections = Counter(
            "gspo_learner_connections_total",
            "Connections to the weight server accepted (TCP) and admitted (their handshake passed)",
            ["outcome"],
            registry=registry,
        )
        self.messages_refused.labels(channel="weights")
        for reason in AUTHENTICATOR_REASONS:
            self.refused_connections.labels(reason=reason)
        self.diagnostics = Gauge(
            "gspo_learner_diagnostic",
            "Diagnostics that the last batch measured (docs/gspo.md), by bucket: lag, or sign of the advantage",
            ["name", "bucket"],
            registry=registry,
        )
        self._diagnosed: set[tuple[str, str]] = set()
        register_process(registry, "learner")

    @property
    def authenticator_counters(self) -> AuthenticatorCounters:
        """The counters of the weight server's authenticator."""
        return AuthenticatorCounters(
            refused=lambda reason: self.refused_connections.labels(reason=reason).inc(),
            connections=lambda outcome: self.connections.labels(outcome=outcome).inc(),
        )

    def set_diagnostics(self, metrics: Mapping[str, float]) -> None:
        """Replace the last batch's metrics: clip_fraction/lag_1 becomes name="clip_fraction", bucket="lag_1"."""
        measured: set[tuple[str, str]] = set()
        for key, value in metrics.items():
            name, _, bucket = key.partition("/")
            self.diagnostics.labels(name=name, bucket=bucket).set(value)
            measured.add((name, bucket))
        for name, bucket in self._diagnosed - measured:
            self.diagnostics.remove(name, bucket)
        self._diagnosed = measured
