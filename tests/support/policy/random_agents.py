"""Agents that do anything: they go on, edit, compact, fork, and call twice at once, with tools, stops and odd texts."""

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from msgspec.structs import replace

from gspo.model.packing import TrainSequence
from gspo_protocol.messages.pieces import pieces_in
from gspo_services.rollout.episodes import EpisodeCalls
from tests.support.agent_episodes import LedgerBroker, ask, echoed, user
from tests.support.broker.ledger import SAMPLING
from tests.support.broker.made_batches import Made, groups_of, made_batch

TOOL: Final = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
TEXTS: Final = ("a", "Grüße\n", "<|im_end|>", '{"x": 1}', "", " \t two  spaces \r\n", "雪\u200d🏔", "<tool_call>", "</think>")
WHAT: Final = ("go on", "go on", "go on", "edit", "compact", "twice", "fork", "answer a tool")
MOST: Final = (None, None, 1, 3)
STOPS: Final = ((), (), ("e",))


async def act(calls: EpisodeCalls, said: list[dict[str, Any]], what: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One act of an agent: what the conversation is after it."""
    fields = {"tools": [TOOL] if what["tools"] else [], "max_tokens": what["max_tokens"], "stop": what["stop"]}
    new = user(what["text"])
    if what["what"] == "edit" and said:
        said = [{**said[0], "content": said[0]["content"] + "!"}, *said[1:]]
    elif what["what"] == "compact":
        said = []
    elif what["what"] == "fork":
        said = said[:2]
    elif what["what"] == "answer a tool" and said and said[-1].get("tool_calls"):
        new = {"role": "tool", "tool_call_id": said[-1]["tool_calls"][0]["id"], "content": what["text"]}
    said = [*said, new]
    if what["what"] == "twice":
        async with asyncio.TaskGroup() as tasks:
            answers = [tasks.create_task(ask(calls, said, **fields)) for _ in range(2)]
        return [*said, echoed(answers[1].result())]
    return [*said, echoed(await ask(calls, said, **fields))]


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
