"""Prometheus metrics of a rollout. Declared once; the registry is passed in."""

from typing import Final, get_args

from prometheus_client import CollectorRegistry

from gspo_protocol.messages.work import RolloutStatus
from gspo_services.shared.net import AUTHENTICATOR_REASONS, AuthenticatorCounters
from gspo_services.shared.runtime.process_metrics import MetricTable, counter, gauge, histogram, register_process
from gspo_services.tasks.agents import AgentFailure
from gspo_services.tasks.environments import FailureReason, RewardPart

STATUSES: Final = get_args(RolloutStatus)
OUTCOMES: Final = ("done", "length", "failed", "engine_error", "lease_ended", "handed_back")
UPDATES: Final = ("loaded", "failed", "not_fetched", "no_patch")
SOURCES: Final = ("fetched", "failed", "slow", "damaged")
FETCHES: Final = ("snapshot", "delta")
CONTEXTS: Final = ("first", "other", "no_bridge")
KINDS: Final = ("action", "observation")
PAUSE_BUCKETS: Final = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
EPISODE_BUCKETS: Final = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
REWARD_BUCKETS: Final = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class RolloutMetrics(MetricTable):
    """What a rollout exports."""

    prefix = "gspo_rollout_"
    episodes_running = gauge("episodes_running", "Episodes in flight")
    episodes_limit = gauge("episodes_limit", "Most episodes in flight (rollout.max_running)")
    episodes = counter("episodes_total", "Episodes that ended here, by outcome", "outcome", zeros=OUTCOMES)
    resumed = counter("episodes_resumed_total", "Leases taken with tokens of a former lease")
    tokens = counter("tokens_total", "Tokens, by kind", "kind", zeros=KINDS)
    unknown_tokens = counter(
        "unknown_tokens_total",
        "Sampled tokens that the tokenizer does not have, because the model's vocabulary is larger; they have no text",
    )
    chunks = counter("chunks_total", "Chunks streamed to the broker")
    unacknowledged = gauge("unacknowledged_messages", "Messages that the broker has not acknowledged")
    policy_version = gauge("policy_version", "Verified policy version that the engine serves")
    weight_updates = counter("weight_updates_total", "Weight updates, by outcome", "outcome", zeros=UPDATES)
    weight_bytes = counter("weight_bytes_total", "Bytes of weights fetched")
    weight_fetches = counter("weight_fetches_total", "Snapshots and deltas fetched and verified", "kind", zeros=FETCHES)
    weights_damaged = counter(
        "weights_damaged_total",
        "Snapshots and deltas that came whole but did not match their manifest; a snapshot follows",
    )
    weight_sources = counter(
        "weight_sources_total", "Fetches of weights from other rollouts, by outcome", "outcome", zeros=SOURCES
    )
    weight_bytes_served = counter("weight_bytes_served_total", "Bytes of weights sent to other rollouts")
    peer_messages_refused = counter("peer_messages_refused_total", "Messages of other rollouts that were not accepted")
    refused_connections = counter(
        "refused_connections_total",
        "Connections of other rollouts refused or ignored, by reason (docs/guide/security.md)",
        "reason",
        zeros=AUTHENTICATOR_REASONS,
    )
    connections = counter(
        "connections_total",
        "Connections of other rollouts accepted (TCP) and admitted (their handshake passed)",
        "outcome",
    )
    weight_fetch_seconds = histogram("weight_fetch_seconds", "Time to fetch and check a version")
    pause_seconds = histogram(
        "generation_pause_seconds", "Time that generation stopped for a weight update", buckets=PAUSE_BUCKETS
    )
    has_device = gauge("has_device", "1 while the engine may use the device, with run.colocate")
    device_acquired = counter("device_acquired_total", "Times the engine got the device")
    device_wait_seconds = counter("device_wait_seconds_total", "Time spent waiting for the learner to give the device back")
    episode_seconds = histogram(
        "episode_seconds", "Time of an episode from its lease to its end here", buckets=EPISODE_BUCKETS
    )
    reward_failures = counter(
        "reward_failures_total",
        "Rewards that could not be computed, or are 0 for that (reward.on_deadline)",
        "failure",
        zeros=get_args(FailureReason),
    )
    reward_seconds = histogram(
        "reward_seconds",
        "Time of a reward: wait is for a free worker (reward.workers), model for the reward model, work is the rest",
        "part",
        buckets=REWARD_BUCKETS,
        zeros=get_args(RewardPart),
    )
    agent_failures = counter(
        "agent_failures_total", "Agents' episodes without a reward", "failure", zeros=get_args(AgentFailure)
    )
    calls_replayed = counter(
        "agent_calls_replayed_total",
        "Calls of agents that were answered, or gone on with, from the record of an earlier run",
    )
    contexts = counter(
        "agent_contexts_total",
        "Sequences that agents' calls began: the first of an episode, another conversation (edited, compacted, a "
        "sub-agent, a call beside another), or one that the chat format cannot go on with exactly",
        "reason",
        zeros=CONTEXTS,
    )
    unparsed_calls = counter(
        "agent_unparsed_tool_calls_total", "Answers with a tool call that could not be read; the agent got it as text"
    )
    divergences = counter("agent_divergences_total", "Repeated episodes whose agent did something else than was recorded")
    turns_discarded = counter(
        "turns_discarded_total", "Sampled turns that no repetition of their episode asked for; they are not trained on"
    )
    status = gauge("status", "1 for the status that the rollout is in", "status", zeros=STATUSES)

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        register_process(registry, "rollout")

    def reward_took(self, part: RewardPart, seconds: float) -> None:
        """Observe how long one part of a reward took."""
        self.reward_seconds.labels(part=part).observe(seconds)

    @property
    def authenticator_counters(self) -> AuthenticatorCounters:
        """Counters of the authenticator for rollouts that fetch weights from this one."""
        return AuthenticatorCounters(
            refused=lambda reason: self.refused_connections.labels(reason=reason).inc(),
            connections=lambda outcome: self.connections.labels(outcome=outcome).inc(),
        )
