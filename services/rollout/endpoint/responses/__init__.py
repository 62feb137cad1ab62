"""OpenAI's responses: requests read, answers written, and kept for the requests that continue them."""

from gspo_services.rollout.endpoint.responses.kept import KeptByEpisode, KeptResponses
from gspo_services.rollout.endpoint.responses.requests import read_response

__all__ = ["KeptByEpisode", "KeptResponses", "read_response"]
