"""An agent written with openai-agents whose tools come from an MCP server."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator

from agents import Agent, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from agents.mcp import MCPServer, MCPServerStdio, MCPServerStreamableHttp
from openai import AsyncOpenAI

from gspo.tasks.agents import Episode

set_tracing_disabled(True)


async def solve(episode: Episode) -> float:
    async with AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key) as policy, shop(episode) as server:
        model = OpenAIChatCompletionsModel(episode.model, policy)
        seller = Agent(name="seller", model=model, mcp_servers=[server])
        result = await Runner.run(seller, episode.task["question"], max_turns=4)
    return float(result.final_output.strip() == episode.task["answer"])


@contextlib.asynccontextmanager
async def shop(episode: Episode) -> AsyncIterator[MCPServer]:
    environment = {**os.environ, "PRICES": json.dumps(episode.task["prices"])}
    program, transport = [sys.executable, episode.task["server"]], episode.task["transport"]
    if transport == "stdio":
        parameters = {"command": program[0], "args": [program[1], "stdio"], "env": environment}
        async with MCPServerStdio(parameters, client_session_timeout_seconds=60) as server:
            yield server
        return
    process = await asyncio.create_subprocess_exec(*program, stdout=asyncio.subprocess.PIPE, env=environment)
    try:
        assert process.stdout is not None
        port = int(await process.stdout.readline())
        parameters = {"url": f"http://127.0.0.1:{port}/mcp", "timeout": 60}
        async with MCPServerStreamableHttp(parameters, client_session_timeout_seconds=60) as server:
            yield server
    finally:
        process.kill()
        await process.wait()
