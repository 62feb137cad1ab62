"""An agent with tools, written with the openai package as it is: what do seven figs cost?

`make demo-agent` trains it. Copy it with agent.toml, and change TOOLS, `use` and the reward. An episode's calls go to
`episode.base_url` with `episode.api_key`; whatever the model samples there is trained on.
"""

import json
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from gspo.tasks.agents import Episode

MAX_TURNS = 4
HTTP = DefaultAsyncHttpxClient()
"""One for all episodes of this process: to make one takes longer than a call."""


def tool(name: str, description: str, kind: str, *parameters: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {each: {"type": kind} for each in parameters}, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS: list[Any] = [
    tool("look", "The price of an item.", "string", "item"),
    tool("multiply", "The product of two numbers.", "integer", "a", "b"),
    tool("add", "The sum of two numbers.", "integer", "a", "b"),
]


async def solve(episode: Episode) -> float:
    """One episode: the task's question, turns with tools, and an answer. Returns the reward: 1 when it is right, else 0."""
    client = AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key, http_client=HTTP)
    messages: list[Any] = [{"role": "user", "content": episode.task["question"]}]
    for _ in range(MAX_TURNS):
        answer = await next_turn(client, episode.model, messages)
        messages.append(answer)
        if not answer.get("tool_calls"):
            return float(answer["content"].strip() == episode.task["answer"])
        for call in answer["tool_calls"]:
            result = await use(episode, **call["function"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return 0.0


async def next_turn(client: AsyncOpenAI, model: str, messages: list[Any]) -> dict[str, Any]:
    """The model's next message, put together from a stream."""
    content = ""
    calls: dict[int, dict[str, Any]] = {}
    async for chunk in await client.chat.completions.create(model=model, messages=messages, tools=TOOLS, stream=True):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for piece in choice.delta.tool_calls or []:
                call = calls.setdefault(piece.index, {"type": "function", "function": {"name": "", "arguments": ""}})
                call["id"] = piece.id or call["id"]
                if piece.function is not None:
                    call["function"]["name"] += piece.function.name or ""
                    call["function"]["arguments"] += piece.function.arguments or ""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    return {**message, "tool_calls": list(calls.values())} if calls else message


async def use(episode: Episode, name: str, arguments: str) -> str:
    """The result of a call. A call that makes no sense is answered too, so that the model can do better in its next turn."""
    try:
        values = json.loads(arguments)
        if name == "look":
            # Recorded: when the episode goes on elsewhere after a crash, nobody is asked a second time.
            return await episode.step("look", look, episode.task["prices"], str(values["item"]))
        if name == "multiply":
            return str(int(values["a"]) * int(values["b"]))
        if name == "add":
            return str(int(values["a"]) + int(values["b"]))
    except (ValueError, TypeError, LookupError):
        return f"error: bad arguments for {name}"
    return f"error: no tool {name}"


async def look(prices: dict[str, int], item: str) -> str:
    """Stands for what happens outside: a query of a database, a purchase, a message that is sent."""
    return str(prices.get(item, f"error: no {item}"))
