"""Random conversations of an agent: tools, calls, results, reasoning, unicode and odd whitespace."""

import json
import random
from typing import Any, Final

TEXTS: Final = (
    "What is 12 + 30?", "The answer is 42.", "Zürich: 3 °C, 雪, 🙂", "\n\nlines\n\n  and  spaces \t\n",
    "{\"a\": [1, 2]}", "x", "  ", "",
    "a.\n", "1234567\n89", "<b>&amp;</b> 'quoted' \"twice\"", "e\u0301 \u200d🏳️‍🌈", "def f(x):\n    return x\n",
)  # fmt: skip


def text(rng: random.Random) -> str:
    """One to three pieces of text."""
    return "".join(rng.choice(TEXTS) for _ in range(rng.randint(1, 3)))


def value(rng: random.Random) -> Any:
    """An argument of a tool call."""
    return rng.choice([3, -0.5, True, False, None, "", "true", text(rng), [1, "b"], {"c": {"d": "ü"}}])


def tools(rng: random.Random) -> list[dict[str, Any]]:
    """One to three tools, as an OpenAI client sends them."""
    return [
        {
            "type": "function",
            "function": {
                "name": f"tool_{index}",
                "description": rng.choice(["", "Looks it up: \"é\" <x>.", "Two\nlines."]),
                "parameters": {
                    "type": "object",
                    "properties": {"q": {"type": "string"}, "n": {"type": "integer", "description": "How many"}},
                    "required": ["q"],
                },
            },
        }
        for index in range(rng.randint(1, 3))
    ]  # fmt: skip


def call(rng: random.Random, number: int) -> dict[str, Any]:
    """A tool call whose arguments are JSON text, as an OpenAI client sends it back."""
    arguments = {"q": rng.choice(["x", 'Zürich "a"', "line\nline"]), **({"n": value(rng)} if rng.random() < 0.5 else {})}
    function = {"name": f"tool_{rng.randint(0, 2)}", "arguments": json.dumps(arguments, ensure_ascii=rng.random() < 0.5)}
    return {"id": f"call_{number}", "type": "function", "function": function}


def assistant(rng: random.Random, *, calls: int, reasoning: bool) -> dict[str, Any]:
    """An answer, with content null where it only calls tools."""
    message: dict[str, Any] = {"role": "assistant", "content": text(rng).strip() or "Yes."}
    if reasoning:
        message["reasoning_content"] = rng.choice(["I think.", "First\n\nthen é", "12 + 30 = 42"])
    if calls:
        message["content"] = rng.choice([None, "", "I will look."])
        message["tool_calls"] = [call(rng, number) for number in range(calls)]
    return message


def results(rng: random.Random, answer: dict[str, Any]) -> list[dict[str, Any]]:
    """What follows ``answer``: the results of its calls, or a user's message."""
    if "tool_calls" not in answer:
        return [{"role": "user", "content": text(rng).strip() + "?"}]
    return [
        {"role": "tool", "tool_call_id": one["id"], "name": one["function"]["name"], "content": text(rng)}
        for one in answer["tool_calls"]
    ]


def beginning(rng: random.Random) -> list[dict[str, Any]]:
    """A user's message, mostly with a system message before it."""
    system = [{"role": "system", "content": text(rng).strip() + "."}] if rng.random() < 0.7 else []
    return [*system, {"role": "user", "content": text(rng) + "?"}]


def conversation(rng: random.Random, *, turns: int, max_calls: int = 2, reasoning: bool = False) -> list[dict[str, Any]]:
    """``turns`` answers, each with what follows it."""
    messages = beginning(rng)
    for _ in range(turns):
        answer = assistant(rng, calls=rng.randint(0, max_calls), reasoning=reasoning and rng.random() < 0.5)
        messages += [answer, *results(rng, answer)]
    return messages
