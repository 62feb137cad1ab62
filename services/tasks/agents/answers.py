"""A reward that comes as JSON, from a program's file or a service's answer."""

from __future__ import annotations

from collections.abc import Mapping

from gspo_services.tasks.agents.results import AgentResult, failed, scored
from gspo_services.tasks.json_rewards import UnreadableError, json_in
from gspo_services.tasks.worker.reward_value import UnscoredError, split_turns, value_of


def answered(body: bytes, what: str, weights: Mapping[str, float] | None) -> AgentResult:
    """The result in ``body``: a number, or a map of components and perhaps rewards of turns; or that as {"reward": ...}."""
    try:
        turns, rest = split_turns(json_in(body, what))
        value = value_of(rest)
    except (UnreadableError, UnscoredError) as error:
        return failed(error.reason, str(error))
    return scored(value, weights, turns)
