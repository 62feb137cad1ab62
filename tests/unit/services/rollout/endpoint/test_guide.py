"""The table of request fields in the guide says what the endpoint does."""

import re
from pathlib import Path
from typing import Any, Final

import pytest

from gspo_services.rollout.endpoint.calls import CallRefused
from gspo_services.rollout.endpoint.chat.requests import read_call
from gspo_services.rollout.endpoint.sampling import RunSampling

PAGE: Final = (Path(__file__).parents[5] / "docs/guide/tasks-and-agents.md").read_text(encoding="utf-8")
TABLE: Final = PAGE[PAGE.index("| fields | what happens |") :].partition("\n\n")[0]
TOOL: Final = {"type": "function", "function": {"name": "look"}}
VALUES: Final[dict[str, Any]] = {
    "messages": [{"role": "user", "content": "a"}], "tools": [TOOL], "stream": True, "max_tokens": 5,
    "max_completion_tokens": 5, "stop": "a", "stop_token_ids": [1], "logprobs": True, "reasoning_effort": "low",
    "chat_template_kwargs": {"enable_thinking": False}, "tool_choice": "required",
    "model": "gpt-5", "temperature": 0.2, "top_p": 0.5, "top_k": 5, "min_p": 0.5, "presence_penalty": 1,
    "frequency_penalty": 1, "repetition_penalty": 2, "logit_bias": {"5": 1}, "parallel_tool_calls": False,
    "response_format": {"type": "json_object"},
    "seed": 1, "store": True, "metadata": {"a": "b"}, "user": "me",
    "n": 2, "best_of": 2, "top_logprobs": 2, "functions": [{}], "modalities": ["audio"], "audio": {"voice": "a"},
    "continue_final_message": True, "echo": True,
}  # fmt: skip
ELSEWHERE: Final = {"previous_response_id", "cache_control"}
"""Fields that Chat Completions do not have."""


def named() -> dict[str, str]:
    """What the table says of each field."""
    rows = [row.strip("| ").split(" | ") for row in TABLE.splitlines()[2:]]
    words = {name: told.split()[0].strip(":,") for fields, told in rows for name in re.findall(r"`(\w+)`", fields)}
    return {name: told for name, told in words.items() if name not in ELSEWHERE}


def done_with(name: str) -> str:
    """What the endpoint does with a field."""
    try:
        call = read_call({"messages": VALUES["messages"], "tools": [TOOL], name: VALUES[name]}, RunSampling(), "own")
    except CallRefused:
        return "refused"
    assert call.unknown == ()
    plain = read_call({"messages": VALUES["messages"], "tools": [TOOL]}, RunSampling(), "own")
    same = (call.request, call.stream) == (plain.request, plain.stream) and name != "logprobs"
    return "overridden" if call.overridden == (name,) else "without" if same else "taken"


def test_the_table_names_the_fields_that_are_tried() -> None:
    assert named().keys() == VALUES.keys()


@pytest.mark.parametrize("name", [*VALUES])
def test_a_field_is_taken_overridden_or_refused_as_the_table_says(name: str) -> None:
    assert done_with(name) == named()[name] or name in ("messages", "tools")
