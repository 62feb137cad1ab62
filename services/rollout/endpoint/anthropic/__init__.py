"""Anthropic's messages: requests read, answers written."""

from gspo_services.rollout.endpoint.anthropic.answers import count_page
from gspo_services.rollout.endpoint.anthropic.requests import read_message

__all__ = ["count_page", "read_message"]
