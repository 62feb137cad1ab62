"""Agents that do anything: they go on, edit, compact, fork, let the policy speak again, and call twice at once, with tools,
stops and odd texts."""

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from msgspec.structs import replace

from gspo.model.packing import TrainSequence
from gspo_protocol.messages.pieces import pieces_in
from gspo_services.rollout.endpoint import CallRequest
from gspo_services.rollout.episodes import EpisodeCalls
from tests.support.agent_episodes import LedgerBroker, ask, user
from tests.support.broker.ledger import SAMPLING
from tests.support.broker.made_batches import Made, groups_of, made_batch
from tests.support.policy.dialects import MESSAGES, body_of, message_in, read

TOOL: Final = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
TEXTS: Final = ("a", "Grüße\n", "<|im_end|>", '{"x": 1}', "", " \t two  spaces \r\n", "雪\u200d🏔", "<tool_call>", "</think>")
WHAT: Final = ("go on", "go on", "go on", "edit", "compact", "twice", "fork", "answer a tool", "speak again")
MOST: Final = (None, None, 1, 3)
STOPS: Final = ((), (), ("e",))
_REST: Final = ("tools", "must_call", "max_tokens", "stop")


async def act(calls: EpisodeCalls, said: list[dict[str, Any]], what: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One act of an agent: what the conversation is after it."""
    fields = {"tools": [TOOL] if what["tools"] else [], "max_tokens": what["max_tokens"], "stop": what["stop"]}
    new = user(what["text"])
    must = CallRequest(messages=[new], must_call="" if what["must"] else None, **fields)
    if must.must_call is not None and fields["tools"] and calls.can_demand(must):
        fields["must_call"] = must.must_call
    if what["what"] == "edit" and said:
        said = [{**said[0], "content": said[0]["content"] + "!"}, *said[1:]]
    elif what["what"] == "compact":
        said = []
    elif what["what"] == "fork":
        said = said[:2]
    elif what["what"] == "answer a tool" and said and said[-1].get("tool_calls"):
        new = {"role": "tool", "tool_call_id": said[-1]["tool_calls"][0]["id"], "content": what["text"]}
    # In Anthropic's dialect the answer would go on within the last message of the assistant, and is refused.
    speaks_again = what["what"] == "speak again" and said and what["path"] != MESSAGES
    said = said if speaks_again else [*said, new]
    if what["what"] == "twice":
        async with asyncio.TaskGroup() as tasks:
            answers = [tasks.create_task(_ask(calls, what["path"], said, fields)) for _ in range(2)]
        return [*said, answers[1].result()]
    return [*said, await _ask(calls, what["path"], said, fields)]


async def _ask(calls: EpisodeCalls, path: str, said: list[dict[str, Any]], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Ask as a client of the dialect at ``path`` does; returns the answer as it reads it."""
    asked = read(path, body_of(path, CallRequest(messages=said, **fields)))
    request = replace(asked.request, stop=fields["stop"])
    return message_in(path, asked, await ask(calls, request.messages, **{name: getattr(request, name) for name in _REST}))


def learned(broker: LedgerBroker) -> tuple[TrainSequence, ...]:
    """The sequences that the learner makes of the episode."""
    assert broker.finish is not None
    _, arrays = broker.lease()
    pieces = pieces_in({**arrays, "turn_rewards": np.asarray(broker.finish.turn_rewards)})
    made = Made(
        trajectory_id=7, group_id=3, token_ids=arrays["token_ids"], logprobs=arrays["logprobs"], pieces=pieces
    )  # fmt: skip
    (group,) = groups_of(
        made_batch([made], policy_version=1, sampling=replace(SAMPLING, temperature=0.7, max_tokens=512 * 64))
    )
    return tuple(sequence.loaded() for sequence in group.sequences)
