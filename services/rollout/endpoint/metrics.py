"""Prometheus metrics of the endpoint. Declared once; the registry is passed in."""

from typing import Final

from gspo_services.rollout.endpoint.sampling import OVERRIDABLE
from gspo_services.shared.runtime.process_metrics import MetricTable, counter, gauge, histogram

HTTP_STATUSES: Final = ("200", "400", "401", "410", "429", "499", "500", "503")
CODES: Final = ("invalid_value", "unsupported_value", "too_many_calls", "draining", "internal")
CALL_BUCKETS: Final = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)


class EndpointMetrics(MetricTable):
    """What an endpoint counts."""

    prefix = "gspo_rollout_endpoint_"
    calls = counter(
        "calls_total",
        "Calls of agents to the model, by the HTTP status that they ended with (499: the agent went away; a stream that "
        "began and failed has the status of its failure)",
        "status",
        zeros=HTTP_STATUSES,
    )
    calls_running = gauge("calls_running", "Calls of agents that are under way")
    call_seconds = histogram("call_seconds", "Time of a call that was answered", buckets=CALL_BUCKETS)
    overridden = counter(
        "overridden_total",
        "Calls whose agent gave a parameter that the run decides, by parameter",
        "parameter",
        zeros=OVERRIDABLE,
    )
    unknown_fields = counter("unknown_fields_total", "Fields of calls that were ignored unread")
    refused = counter("refused_total", "Requests of agents that were refused, by code", "code", zeros=CODES)
