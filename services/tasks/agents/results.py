"""What is asked of an agent, and what comes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import msgspec

from gspo.tasks.environments import Task
from gspo_services.tasks.environments import reason_of, require_takeable, score_of
from gspo_services.tasks.json_rewards import UnreadableError, json_in
from gspo_services.tasks.worker.reward_value import UnscoredError, UnscoredReason, split_turns, value_of


def answered(body: bytes, what: str, weights: Mapping[str, float] | None) -> AgentResult:
    """The result in ``body``: a number, or a map of components and perhaps rewards of turns; or that as {"reward": ...}."""
    try:
        turns, rest = split_turns(json_in(body, what))
        value = value_of(rest)
    except (UnreadableError, UnscoredError) as error:
        return failed(error.reason, str(error))
    return scored(value, weights, turns)


AgentFailure = Literal[
    UnscoredReason, "deadline", "raised", "memory", "hung", "crashed", "no_worker", "unknown_function", "not_started",
    "too_large", "bad_message", "no_result", "wrong_turns", "unreachable", "refused", "sandbox", "closed",
]  # fmt: skip
"""Why an episode has no reward. hung: its code blocked the event loop. crashed: its process ended, perhaps by the fault of
another episode in it. no_worker: workers end before they can begin an episode. bad_message: its process said what no worker
says. wrong_turns: it rewards another number of answers than it got, or other roles than have played. refused: its service
answered with an error. sandbox: its computer could run no command."""


class AgentTask(msgspec.Struct, frozen=True, kw_only=True):
    """One episode for an agent to solve."""

    task: Task
    seed: int
    base_url: str
    """The policy as a server of OpenAI or Anthropic."""
    api_key: str
    """Tells the server which episode asks."""
    model: str
    roles: list[str] = []
    """That the policy plays in an episode; none for one."""
    deadline_s: Annotated[float, msgspec.Meta(gt=0)]
    """Wall-clock seconds for the episode; waiting for a free place and starting a worker do not count."""


class AgentResult(msgspec.Struct, frozen=True, kw_only=True):
    """How an episode ended."""

    reward: float | None
    """Finite; None when there is a failure."""
    components: dict[str, float] = {}
    """The parts of the reward by name, without their weights."""
    turns: list[float] | None = None
    """The reward of each turn, whose sum is ``reward``; None: it belongs to the episode as a whole."""
    failure: AgentFailure | None = None
    detail: str = ""
    """The failure for people, with file and line of the user's code."""
    in_company: bool = False
    """Its worker ended with other episodes in it, any of which may have ended it."""


def failed(reason: AgentFailure, detail: str, *, in_company: bool = False) -> AgentResult:
    """An episode without a reward."""
    return AgentResult(reward=None, failure=reason, detail=detail, in_company=in_company)


def scored(
    value: float | dict[str, float], weights: Mapping[str, float] | None, turns: Sequence[float] | None = None
) -> AgentResult:
    """The result of an episode with this reward or these components, and perhaps rewards of its turns: then the former come
    with the last turn."""
    try:
        score = score_of(value, weights)
        of_turns = [score.reward] if not turns else [*turns[:-1], turns[-1] + score.reward]
        require_takeable(of_turns, score.components)
    except Exception as error:  # noqa: BLE001 - whatever is wrong with the value, it is the agent's
        return failed(*reason_of(error))
    if turns is None:
        return AgentResult(reward=score.reward, components=score.components)
    return AgentResult(reward=sum(of_turns), components=score.components, turns=of_turns if turns else [])
