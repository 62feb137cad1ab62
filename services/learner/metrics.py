"""Prometheus metrics of the learner. Declared once; the registry is passed in."""

from collections.abc import Mapping
from typing import Final

from prometheus_client import CollectorRegistry

from gspo_services.shared.net import AUTHENTICATOR_REASONS, AuthenticatorCounters
from gspo_services.shared.runtime.process_metrics import MetricTable, counter, gauge, histogram, register_process

LONG_BUCKETS: Final = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
ANNOUNCE_BUCKETS: Final = (0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class LearnerMetrics(MetricTable):
    """The metrics that rank 0 of the learner exports."""

    prefix = "gspo_learner_"
    batches = counter("batches_total", "Batches trained")
    tokens = counter("tokens_total", "Tokens trained on, observations included")
    trajectories = counter("trajectories_total", "Trajectories trained on")
    policy_version = gauge("policy_version", "Newest published policy version")
    next_batch = gauge("next_batch", "Index of the next batch")
    train_seconds = histogram("batch_seconds", "Time to train one batch", buckets=LONG_BUCKETS)
    wait_seconds = counter("wait_seconds_total", "Time spent waiting for batches")
    has_device = gauge("has_device", "1 while the learner may use the device, with run.colocate")
    device_acquired = counter("device_acquired_total", "Times the learner got the device")
    device_wait_seconds = counter("device_wait_seconds_total", "Time spent waiting for the rollout to give the device back")
    publish_seconds = histogram("publish_seconds", "Time that training waited for a version to be copied")
    publish_wait_seconds = counter(
        "publish_wait_seconds_total", "Of that, the time until the version before was announced: publishing bounds the run"
    )
    announce_seconds = histogram(
        "announce_seconds",
        "Time from the copy of a version to its announcement, during training: digests, delta",
        buckets=ANNOUNCE_BUCKETS,
    )
    checkpoint_seconds = histogram("checkpoint_seconds", "Time that training waited for a checkpoint")
    checkpoint_write_seconds = histogram(
        "checkpoint_write_seconds",
        "Time from the start of a checkpoint until a learner could resume from it",
        buckets=LONG_BUCKETS,
    )
    damaged_checkpoint_files = gauge(
        "damaged_checkpoint_files", "Files of checkpoints that were not what was written when they were last read"
    )
    weight_bytes_sent = counter("weight_bytes_sent_total", "Bytes of weights that all ranks have sent")
    weight_sources_failed = counter(
        "weight_sources_failed_total",
        "Rollouts that were referred to another rollout for weights and came back to the learner",
    )
    weight_loads = counter("weight_loads_total", "Versions that an engine loaded and verified")
    weight_loads_failed = counter("weight_loads_failed_total", "Versions that an engine did not load")
    messages_refused = counter("messages_refused_total", "Messages that the learner refused", "channel", zeros=("weights",))
    refused_connections = counter(
        "refused_connections_total",
        "Connections to the weight server refused or ignored, by reason (docs/guide/security.md)",
        "reason",
        zeros=AUTHENTICATOR_REASONS,
    )
    connections = counter(
        "connections_total",
        "Connections to the weight server accepted (TCP) and admitted (their handshake passed)",
        "outcome",
    )
    diagnostics = gauge(
        "diagnostic",
        "Diagnostics that the last batch measured (docs/gspo.md), by bucket: lag, or sign of the advantage",
        "name",
        "bucket",
    )

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
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
