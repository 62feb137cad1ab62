"""Frameworks of agents: the first form of each."""

from typing import Any

import pydantic

from gspo.tasks.agents import Episode


class Total(pydantic.BaseModel):
    """The answer as an object."""

    total: int


def look(item: str) -> str:
    """The price of an item.

    Args:
        item: Which one.
    """
    return "7"


def openai_client(episode: Episode) -> Any:
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key, max_retries=0)


async def run_agents(episode: Episode, *, chat: bool = False, **options: Any) -> Any:
    import agents

    agents.set_tracing_disabled(True)
    agents.set_default_openai_client(openai_client(episode), use_for_tracing=False)
    # Without a name of a model: the library reads "org/name" as a provider and its model.
    model = agents.OpenAIChatCompletionsModel(episode.model, openai_client(episode)) if chat else None
    agent = agents.Agent(name="Assistant", instructions="Be brief.", model=model, **options)
    return (await agents.Runner.run(agent, episode.task["question"], max_turns=4)).final_output


async def agents_default(episode: Episode) -> str:
    from agents import function_tool

    return await run_agents(episode, tools=[function_tool(look)])


async def agents_chat(episode: Episode) -> str:
    from agents import function_tool

    return await run_agents(episode, chat=True, tools=[function_tool(look)])


async def agents_output_type(episode: Episode) -> str:
    return str((await run_agents(episode, output_type=Total)).total)


async def agents_tool_choice(episode: Episode) -> str:
    from agents import ModelSettings, function_tool

    settings = ModelSettings(tool_choice="required", temperature=0, parallel_tool_calls=False)
    return await run_agents(episode, tools=[function_tool(look)], model_settings=settings)


async def agents_handoff(episode: Episode) -> str:
    from agents import Agent

    other = Agent(name="Clerk", instructions="Be brief.", handoff_description="Knows prices.")
    return await run_agents(episode, handoffs=[other])


async def agents_streamed(episode: Episode) -> str:
    import agents

    agents.set_tracing_disabled(True)
    agents.set_default_openai_client(openai_client(episode), use_for_tracing=False)
    agent = agents.Agent(name="Assistant", tools=[agents.function_tool(look)])
    result = agents.Runner.run_streamed(agent, episode.task["question"])
    async for _ in result.stream_events():
        pass
    return result.final_output


def pydantic_model(episode: Episode, name: str = "OpenAIChatModel") -> Any:
    from pydantic_ai.models import openai
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=episode.base_url, api_key=episode.api_key)
    return getattr(openai, name)(episode.model, provider=provider)


async def pydantic_tools(episode: Episode) -> str:
    from pydantic_ai import Agent

    return (
        await Agent(pydantic_model(episode), instructions="Be brief.", tools=[look]).run(episode.task["question"])
    ).output


async def pydantic_output(episode: Episode) -> str:
    from pydantic_ai import Agent

    return str((await Agent(pydantic_model(episode), output_type=Total).run(episode.task["question"])).output.total)


async def pydantic_native(episode: Episode) -> str:
    from pydantic_ai import Agent, NativeOutput

    agent = Agent(pydantic_model(episode), output_type=NativeOutput(Total))
    return str((await agent.run(episode.task["question"])).output.total)


async def pydantic_prompted(episode: Episode) -> str:
    from pydantic_ai import Agent, PromptedOutput

    agent = Agent(pydantic_model(episode), output_type=PromptedOutput(Total))
    return str((await agent.run(episode.task["question"])).output.total)


async def pydantic_responses(episode: Episode) -> str:
    from pydantic_ai import Agent

    model = pydantic_model(episode, "OpenAIResponsesModel")
    return (await Agent(model, instructions="Be brief.", tools=[look]).run(episode.task["question"])).output


async def pydantic_responses_output(episode: Episode) -> str:
    from pydantic_ai import Agent

    agent = Agent(pydantic_model(episode, "OpenAIResponsesModel"), output_type=Total)
    return str((await agent.run(episode.task["question"])).output.total)


async def pydantic_stream(episode: Episode) -> str:
    from pydantic_ai import Agent

    async with Agent(pydantic_model(episode), tools=[look]).run_stream(episode.task["question"]) as result:
        return await result.get_output()


def smol(episode: Episode, kind: str) -> str:
    import smolagents

    model = smolagents.OpenAIModel(model_id=episode.model, api_base=episode.base_url, api_key=episode.api_key)
    agent = getattr(smolagents, kind)(tools=[smolagents.tool(look)], model=model, max_steps=3, verbosity_level=0)
    said = str(agent.run(episode.task["question"]))
    [*errors] = [str(step.error) for step in agent.memory.steps if getattr(step, "error", None)]
    assert not errors, errors
    return said


def smol_code(episode: Episode) -> str:
    return smol(episode, "CodeAgent")


def smol_tools(episode: Episode) -> str:
    return smol(episode, "ToolCallingAgent")


def chat_openai(episode: Episode, **more: Any) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model=episode.model, base_url=episode.base_url, api_key=episode.api_key, max_retries=0, **more)


async def langchain_chat(episode: Episode) -> str:
    return (await chat_openai(episode, temperature=0).ainvoke(episode.task["question"])).content


async def langchain_stream(episode: Episode) -> str:
    return "".join([chunk.content async for chunk in chat_openai(episode).astream(episode.task["question"])])


async def langchain_structured(episode: Episode) -> str:
    return str((await chat_openai(episode).with_structured_output(Total).ainvoke(episode.task["question"])).total)


async def langchain_structured_by_tool(episode: Episode) -> str:
    model = chat_openai(episode).with_structured_output(Total, method="function_calling")
    return str((await model.ainvoke(episode.task["question"])).total)


async def langchain_responses(episode: Episode) -> str:
    return (await chat_openai(episode, use_responses_api=True).ainvoke(episode.task["question"])).text


async def react(model: Any, episode: Episode, **more: Any) -> Any:
    from langgraph.prebuilt import create_react_agent

    agent = create_react_agent(model, [look], **more)
    return await agent.ainvoke({"messages": [{"role": "user", "content": episode.task["question"]}]})


async def langgraph_react(episode: Episode) -> str:
    return (await react(chat_openai(episode), episode))["messages"][-1].content


async def langgraph_responses(episode: Episode) -> str:
    return (await react(chat_openai(episode, use_responses_api=True), episode))["messages"][-1].text


async def langgraph_format(episode: Episode) -> str:
    return str((await react(chat_openai(episode), episode, response_format=Total))["structured_response"].total)


def chat_anthropic(episode: Episode) -> Any:
    from langchain_anthropic import ChatAnthropic

    return ChatAnthropic(model="claude-sonnet-5", base_url=episode.base_url, api_key=episode.api_key, max_retries=0)


async def langchain_anthropic(episode: Episode) -> str:
    return (await chat_anthropic(episode).ainvoke(episode.task["question"])).text


async def langchain_anthropic_structured(episode: Episode) -> str:
    return str((await chat_anthropic(episode).with_structured_output(Total).ainvoke(episode.task["question"])).total)


async def langgraph_anthropic(episode: Episode) -> str:
    return (await react(chat_anthropic(episode), episode))["messages"][-1].text
