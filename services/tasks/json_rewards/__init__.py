"""Rewards that come as JSON from services and programs of users: one bounded request, one bounded answer."""

from gspo_services.tasks.json_rewards.client import JsonClient, UnansweredError, UnansweredReason
from gspo_services.tasks.json_rewards.reading import MAX_ANSWER_BYTES, UnreadableError, UnreadableReason, json_in, reward_in

__all__ = [
    "MAX_ANSWER_BYTES",
    "JsonClient",
    "UnansweredError",
    "UnansweredReason",
    "UnreadableError",
    "UnreadableReason",
    "json_in",
    "reward_in",
]
