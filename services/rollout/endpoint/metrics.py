"""Prometheus metrics of the endpoint. Declared once; the registry is passed in."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from gspo_services.rollout.endpoint.requests import OVERRIDABLE


class EndpointMetrics:
    """What an endpoint counts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.calls = Counter(
            "gspo_rollout_endpoint_calls_total",
            "Calls of agents to the model, by the HTTP status that they ended with (499: the agent went away; a stream that "
            "began and failed has the status of its failure)",
            ["status"],
            registry=registry,
        )
        self.calls_running = Gauge(
            "gspo_rollout_endpoint_calls_running", "Calls of agents that are under way", registry=registry
        )
        self.call_seconds = Histogram(
            "gspo_rollout_endpoint_call_seconds",
            "Time of a call that was answered",
            buckets=(0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000),
            registry=registry,
        )
        self.overridden = Counter(
            "gspo_rollout_endpoint_overridden_total",
            "Calls whose agent gave a parameter that the run decides, by parameter",
            ["parameter"],
            registry=registry,
        )
        self.unknown_fields = Counter(
            "gspo_rollout_endpoint_unknown_fields_total", "Fields of calls that were ignored unread", registry=registry
        )
        self.refused = Counter(
            "gspo_rollout_endpoint_refused_total",
            "Requests of agents that were refused, by code",
            ["code"],
            registry=registry,
        )
        # rate() and increase() miss the first event of a counter that does not exist before it.
        for status in ("200", "400", "401", "410", "429", "499", "500", "503"):
            self.calls.labels(status=status)
        for parameter in OVERRIDABLE:
            self.overridden.labels(parameter=parameter)
        for code in ("invalid_value", "unsupported_value", "too_many_calls", "draining", "internal"):
            self.refused.labels(code=code)
