"""The agent of tool_agent.py, written with openai-agents: what do seven figs cost?

It needs no integration: the endpoint is the model's base_url, and the episode's key is its api_key.
"""

import asyncio
import contextlib
from dataclasses import dataclass, field

from agents import (
    Agent,
    MaxTurnsExceeded,
    OpenAIChatCompletionsModel,
    RunContextWrapper,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from gspo.tasks.agents import Episode

set_tracing_disabled(True)  # Or it sends what your agents do to OpenAI.

HTTP = DefaultAsyncHttpxClient()
"""One for all episodes of this process: to make one takes longer than a call."""


@dataclass
class Shop:
    """What the tools of one episode share."""

    episode: Episode
    one_by_one: asyncio.Lock = field(default_factory=asyncio.Lock)
    """The library runs the calls of a turn side by side, and the steps of an episode come one after another."""


@function_tool(strict_mode=False)
async def look(context: RunContextWrapper[Shop], item: str) -> str:
    """The price of an item."""
    shop = context.context
    async with shop.one_by_one:
        # Recorded: when the episode goes on elsewhere after a crash, nobody is asked a second time.
        return await shop.episode.step("look", price_of, shop.episode.task["prices"], item)


@function_tool(strict_mode=False)
def multiply(a: int, b: int) -> str:
    """The product of two numbers."""
    return str(a * b)


@function_tool(strict_mode=False)
def add(a: int, b: int) -> str:
    """The sum of two numbers."""
    return str(a + b)


async def solve(episode: Episode) -> float:
    """One episode. Returns the reward: 1 when the answer is right, else 0."""
    policy = AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key, http_client=HTTP)
    seller = Agent[Shop](name="seller", model=OpenAIChatCompletionsModel(episode.model, policy), tools=[look, multiply, add])
    with contextlib.suppress(MaxTurnsExceeded):
        result = await Runner.run(seller, episode.task["question"], context=Shop(episode), max_turns=4)
        return float(str(result.final_output).strip() == episode.task["answer"])
    return 0.0


async def price_of(prices: dict[str, int], item: str) -> str:
    """Stands for what happens outside: a query of a database, a purchase, a message that is sent."""
    return str(prices.get(item, f"error: no {item}"))
