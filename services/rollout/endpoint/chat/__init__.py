"""OpenAI's chat completions: requests read, answers written."""

from gspo_services.rollout.endpoint.chat.requests import WITHOUT_EFFECT, ToolChoice, read_call, read_choice, read_stops

__all__ = ["WITHOUT_EFFECT", "ToolChoice", "read_call", "read_choice", "read_stops"]
