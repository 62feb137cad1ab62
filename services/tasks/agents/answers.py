"""A reward that comes as JSON, from a program's file or a service's answer."""

from __future__ import annotations

from collections.abc import Mapping

from gspo_services.tasks.agents.results import AgentResult, failed, scored
from gspo_services.tasks.json_rewards import UnreadableError, reward_in
from gspo_services.tasks.worker.reward_value import UnscoredError


def answered(body: bytes, what: str, weights: Mapping[str, float] | None) -> AgentResult:
    """The result in ``body``: a number, a map of components, or either of them as {"reward": ...}."""
    try:
        value = reward_in(body, what)
    except (UnreadableError, UnscoredError) as error:
        return failed(error.reason, str(error))
    return scored(value, weights)
