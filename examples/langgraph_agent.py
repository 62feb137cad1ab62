"""The agent of tool_agent.py, written with langgraph: what do seven figs cost?

It needs no integration: the endpoint is the model's base_url, and the episode's key is its api_key.
"""

import asyncio
import contextlib
from typing import Any

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from openai import DefaultAsyncHttpxClient

from gspo.tasks.agents import Episode

HTTP = DefaultAsyncHttpxClient()
"""One for all episodes of this process: to make one takes longer than a call."""


@tool
def multiply(a: int, b: int) -> str:
    """The product of two numbers."""
    return str(a * b)


@tool
def add(a: int, b: int) -> str:
    """The sum of two numbers."""
    return str(a + b)


async def solve(episode: Episode) -> float:
    """One episode. Returns the reward: 1 when the answer is right, else 0."""
    one_by_one = asyncio.Lock()

    @tool
    async def look(item: str) -> str:
        """The price of an item."""
        # The library runs the calls of a turn side by side, and the steps of an episode come one after another.
        async with one_by_one:
            # Recorded: when the episode goes on elsewhere after a crash, nobody is asked a second time.
            return await episode.step("look", price_of, episode.task["prices"], item)

    tools = [look, multiply, add]
    policy = ChatOpenAI(
        base_url=episode.base_url, api_key=episode.api_key, model=episode.model, http_async_client=HTTP
    ).bind_tools(tools)

    async def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await policy.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("ask", ask)
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "ask")
    graph.add_conditional_edges("ask", tools_condition)
    graph.add_edge("tools", "ask")
    question = {"messages": [("user", episode.task["question"])]}
    with contextlib.suppress(GraphRecursionError):
        done = await graph.compile().ainvoke(question, {"recursion_limit": 8})
        return float(done["messages"][-1].text.strip() == episode.task["answer"])
    return 0.0


async def price_of(prices: dict[str, int], item: str) -> str:
    """Stands for what happens outside: a query of a database, a purchase, a message that is sent."""
    return str(prices.get(item, f"error: no {item}"))
