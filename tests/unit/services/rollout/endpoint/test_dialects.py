"""The three dialects are one conversation: what each writes of it comes out as the same messages, tools and limits."""

import json
import random
from itertools import product
from typing import Any

import pytest

from gspo_services.rollout.endpoint import CallRefused, CallRequest, ToolCall
from gspo_services.rollout.episodes.fingerprints import message_key
from gspo_services.rollout.episodes.parsed_answer import answer_key
from tests.support.policy.dialects import MESSAGES, PATHS, body_of, message_in, read
from tests.support.scripted_episodes import answer

WORDS = ["", " ", "hi", "42", "é\n", "<tool_call>", "{}", "a\tb"]


def conversation(rng: random.Random) -> list[dict[str, Any]]:
    """Messages as ``CallRequest`` has them: the last one is a user's, a tool's or the assistant's."""
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.5:
        messages.append({"role": "system", "content": "Be " + rng.choice(WORDS)})
    for turn in range(rng.randrange(4)):
        messages.append({"role": "user", "content": "u" + rng.choice(WORDS)})
        said: dict[str, Any] = {"role": "assistant", "content": rng.choice([None, "a" + rng.choice(WORDS)])}
        names = [f"call_{turn}_{index}" for index in range(rng.randrange(3))]
        if names:
            arguments = [json.dumps({"at": rng.randrange(9)}, separators=(",", ":")) for _ in names]
            said["tool_calls"] = [
                {"id": name, "type": "function", "function": {"name": "look", "arguments": text}}
                for name, text in zip(names, arguments, strict=True)
            ]
        elif said["content"] is None:
            said["content"] = "none"
        if rng.random() < 0.3:
            said["reasoning_content"] = "r" + rng.choice(WORDS)
        messages.append(said)
        messages += [{"role": "tool", "content": rng.choice(WORDS), "tool_call_id": name} for name in names]
    if messages and messages[-1]["role"] != "system" and rng.random() < 0.3:
        return messages
    return [*messages, {"role": "user", "content": "last"}]


def test_a_thousand_conversations_are_the_same_in_each_dialect() -> None:
    rng = random.Random(0)
    schema = {"type": "object", "properties": {"at": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": schema}}]
    for _ in range(1000):
        must_call = rng.choice([None, "", "look"])
        request = CallRequest(messages=conversation(rng), tools=tools, must_call=must_call, max_tokens=9)
        for path in PATHS:
            body = body_of(path, request)
            if path == MESSAGES and request.messages[-1]["role"] == "assistant":
                with pytest.raises(CallRefused) as caught:
                    read(path, body)
                assert caught.value.code == "prefill"
                continue
            asked = read(path, body)
            assert (asked.request, asked.unknown) == (request, ()), path


def test_what_each_dialect_answers_is_the_same_message() -> None:
    calls = [ToolCall(id="c1", name="look", arguments='{"at":1}')]
    request = CallRequest(messages=[{"role": "user", "content": "hi"}])
    for content, reasoning, called in product([None, "", "Hello."], [None, "hm"], [[], calls]):
        given = answer(content, reasoning=reasoning, tool_calls=called)
        for path in PATHS:
            said = message_in(path, read(path, body_of(path, request)), given)
            assert message_key(said).repeats(answer_key(given)), path
