"""The endpoint of a rollout, in the dialects of OpenAI and Anthropic: an agent's model calls, one key for each episode."""

from gspo_services.rollout.endpoint.calls import (
    CallAnswer,
    CallDelta,
    CallRefused,
    CallRequest,
    Calls,
    Episodes,
    FinishReason,
    ToolCall,
)
from gspo_services.rollout.endpoint.metrics import EndpointMetrics
from gspo_services.rollout.endpoint.sampling import RunSampling
from gspo_services.rollout.endpoint.server import EndpointLimits, EndpointServer

__all__ = [
    "CallAnswer",
    "CallDelta",
    "CallRefused",
    "CallRequest",
    "Calls",
    "EndpointLimits",
    "EndpointMetrics",
    "EndpointServer",
    "Episodes",
    "FinishReason",
    "RunSampling",
    "ToolCall",
]
