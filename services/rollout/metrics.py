"""Prometheus metrics of a rollout. Declared once; the registry is passed in."""

from typing import Final, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from gspo_protocol.messages.work import RolloutStatus
from gspo_services.shared.net import AUTHENTICATOR_REASONS, AuthenticatorCounters
from gspo_services.shared.runtime.process_metrics import register_process
from gspo_services.tasks.agents import AgentFailure
from gspo_services.tasks.environments import FailureReason, RewardPart

STATUSES: Final = get_args(RolloutStatus)
OUTCOMES: Final = ("done", "length", "failed", "engine_error", "lease_ended", "handed_back")
UPDATES: Final = ("loaded", "failed", "not_fetched", "no_patch")
SOURCES: Final = ("fetched", "failed", "slow", "damaged")
FETCHES: Final = ("snapshot", "delta")
CONTEXTS: Final = ("first", "other", "no_bridge")
KINDS: Final = ("action", "observation")


class RolloutMetrics:
    """What a rollout exports."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.episodes_running = Gauge("gspo_rollout_episodes_running", "Episodes in flight", registry=registry)
        self.episodes_limit = Gauge(
            "gspo_rollout_episodes_limit", "Most episodes in flight (rollout.max_running)", registry=registry
        )
        self.episodes = Counter(
            "gspo_rollout_episodes_total", "Episodes that ended here, by outcome", ["outcome"], registry=registry
        )
        self.resumed = Counter(
            "gspo_rollout_episodes_resumed_total", "Leases taken with tokens of a former lease", registry=registry
        )
        self.tokens = Counter("gspo_rollout_tokens_total", "Tokens, by kind", ["kind"], registry=registry)
        self.chunks = Counter("gspo_rollout_chunks_total", "Chunks streamed to the broker", registry=registry)
        self.unacknowledged = Gauge(
            "gspo_rollout_unacknowledged_messages", "Messages that the broker has not acknowledged", registry=registry
        )
        self.policy_version = Gauge(
            "gspo_rollout_policy_version", "Verified policy version that the engine serves", registry=registry
        )
        self.weight_updates = Counter(
            "gspo_rollout_weight_updates_total", "Weight updates, by outcome", ["outcome"], registry=registry
        )
        self.weight_bytes = Counter("gspo_rollout_weight_bytes_total", "Bytes of weights fetched", registry=registry)
        self.weight_fetches = Counter(
            "gspo_rollout_weight_fetches_total", "Snapshots and deltas fetched and verified", ["kind"], registry=registry
        )
        self.weights_damaged = Counter(
            "gspo_rollout_weights_damaged_total",
            "Snapshots and deltas that came whole but did not match their manifest; a snapshot follows",
            registry=registry,
        )
        self.weight_sources = Counter(
            "gspo_rollout_weight_sources_total",
            "Fetches of weights from other rollouts, by outcome",
            ["outcome"],
            registry=registry,
        )
        self.weight_bytes_served = Counter(
            "gspo_rollout_weight_bytes_served_total", "Bytes of weights sent to other rollouts", registry=registry
        )
        self.peer_messages_refused = Counter(
            "gspo_rollout_peer_messages_refused_total",
            "Messages of other rollouts that were not accepted",
            registry=registry,
        )
        self.refused_connections = Counter(
            "gspo_rollout_refused_connections_total",
            "Connections of other rollouts refused or ignored, by reason (docs/guide/security.md)",
            ["reason"],
            registry=registry,
        )
        self.connections = Counter(
            "gspo_rollout_connections_total",
            "Connections of other rollouts accepted (TCP) and admitted (their handshake passed)",
            ["outcome"],
            registry=registry,
        )
        self.weight_fetch_seconds = Histogram(
            "gspo_rollout_weight_fetch_seconds", "Time to fetch and check a version", registry=registry
        )
        self.pause_seconds = Histogram(
            "gspo_rollout_generation_pause_seconds",
            "Time that generation stopped for a weight update",
            buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
            registry=registry,
        )
        self.has_device = Gauge(
            "gspo_rollout_has_device", "1 while the engine may use the device, with run.take_turns", registry=registry
        )
        self.device_turns = Counter("gspo_rollout_device_turns_total", "Turns on the device that began", registry=registry)
        self.device_wait_seconds = Counter(
            "gspo_rollout_device_wait_seconds_total", "Time spent waiting for the learner's turn to end", registry=registry
        )
        self.episode_seconds = Histogram(
            "gspo_rollout_episode_seconds",
            "Time of an episode from its lease to its end here",
            buckets=(0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000),
            registry=registry,
        )
        self.reward_failures = Counter(
            "gspo_rollout_reward_failures_total",
            "Rewards that could not be computed, or are 0 for that (reward.on_deadline)",
            ["failure"],
            registry=registry,
        )
        self.reward_seconds = Histogram(
            "gspo_rollout_reward_seconds",
            "Time of a reward: wait is for a free worker (reward.workers), work is the rest",
            ["part"],
            buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
            registry=registry,
        )
        self.agent_failures = Counter(
            "gspo_rollout_agent_failures_total", "Agents' episodes without a reward", ["failure"], registry=registry
        )
        self.calls_replayed = Counter(
            "gspo_rollout_agent_calls_replayed_total",
            "Calls of agents that were answered, or gone on with, from the record of an earlier run",
            registry=registry,
        )
        self.contexts = Counter(
            "gspo_rollout_agent_contexts_total",
            "Sequences that agents' calls began: the first of an episode, another conversation (edited, compacted, a "
            "sub-agent, a call beside another), or one that the chat format cannot go on with exactly",
            ["reason"],
            registry=registry,
        )
        self.unparsed_calls = Counter(
            "gspo_rollout_agent_unparsed_tool_calls_total",
            "Answers with a tool call that could not be read; the agent got it as text",
            registry=registry,
        )
        self.divergences = Counter(
            "gspo_rollout_agent_divergences_total",
            "Repeated episodes whose agent did something else than was recorded",
            registry=registry,
        )
        self.turns_discarded = Counter(
            "gspo_rollout_turns_discarded_total",
            "Sampled turns that no repetition of their episode asked for; they are not trained on",
            registry=registry,
        )
        self.status = Gauge("gspo_rollout_status", "1 for the status that the rollout is in", ["status"], registry=registry)
        # rate() and increase() miss the first event of a counter that does not exist before it.
        for outcome in OUTCOMES:
            self.episodes.labels(outcome=outcome)
        for outcome in UPDATES:
            self.weight_updates.labels(outcome=outcome)
        for outcome in SOURCES:
            self.weight_sources.labels(outcome=outcome)
        for reason in AUTHENTICATOR_REASONS:
            self.refused_connections.labels(reason=reason)
        for fetched in FETCHES:
            self.weight_fetches.labels(kind=fetched)
        for kind in KINDS:
            self.tokens.labels(kind=kind)
        for failure in get_args(FailureReason):
            self.reward_failures.labels(failure=failure)
        for context in CONTEXTS:
            self.contexts.labels(reason=context)
        for failure in get_args(AgentFailure):
            self.agent_failures.labels(failure=failure)
        for part in get_args(RewardPart):
            self.reward_seconds.labels(part=part)
        for status in STATUSES:
            self.status.labels(status=status)
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
