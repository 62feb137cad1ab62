"""The dialects of the endpoint: the path of each, how a request is read, and the form of its errors."""

from collections.abc import Callable, Mapping
from typing import Final

from gspo_services.rollout.endpoint.anthropic import read_message
from gspo_services.rollout.endpoint.asked import AgentCall
from gspo_services.rollout.endpoint.calls import CallRefused
from gspo_services.rollout.endpoint.chat import read_call
from gspo_services.rollout.endpoint.pages import anthropic_error, openai_error
from gspo_services.rollout.endpoint.responses import KeptResponses, read_response
from gspo_services.rollout.endpoint.sampling import RunSampling

MODELS_PATH: Final = "/v1/models"
MESSAGES_PATH: Final = "/v1/messages"
COUNT_PATH: Final = "/v1/messages/count_tokens"


Read = Callable[[object, RunSampling, str, KeptResponses], AgentCall]
"""Reads a request: its JSON, the run's sampling, the model's name, and the episode's earlier responses."""

DIALECTS: Final[Mapping[str, Read]] = {
    "/v1/chat/completions": lambda plain, sampling, model, _: read_call(plain, sampling, model),
    "/v1/responses": read_response,
    MESSAGES_PATH: lambda plain, sampling, model, _: read_message(plain, sampling, model),
}
"""By path."""


def path_of(asked: str) -> str:
    """Return the path that a client means. Anthropic's own puts /v1 before its paths, also after a base URL that has one."""
    return asked.removeprefix("/v1") if asked.startswith("/v1/v1/") else asked


def error_of(path: str) -> Callable[[CallRefused, str], bytes]:
    """Return the form of an error on this path."""
    return anthropic_error if path.startswith(MESSAGES_PATH) else openai_error
