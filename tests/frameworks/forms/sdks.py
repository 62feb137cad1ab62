"""OpenAI's and Anthropic's SDKs, and what is a thin layer over them: the first form of each."""

from typing import Any

import pydantic

from gspo.tasks.agents import Episode


class Total(pydantic.BaseModel):
    """The answer as an object."""

    total: int


LOOK = {
    "name": "look",
    "description": "The price of an item.",
    "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
}


def openai_client(episode: Episode) -> Any:
    from openai import OpenAI

    return OpenAI(base_url=episode.base_url, api_key=episode.api_key, max_retries=0)


def anthropic_client(episode: Episode) -> Any:
    from anthropic import Anthropic

    return Anthropic(base_url=episode.base_url, api_key=episode.api_key, max_retries=0)


def user(episode: Episode) -> list[dict[str, str]]:
    return [{"role": "user", "content": episode.task["question"]}]


def openai_chat(episode: Episode) -> str:
    said = openai_client(episode).chat.completions.create(model="gpt-5", messages=user(episode))
    return said.choices[0].message.content


def openai_chat_stream(episode: Episode) -> str:
    chunks = openai_client(episode).chat.completions.create(model="gpt-5", messages=user(episode), stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def openai_chat_parse(episode: Episode) -> str:
    said = openai_client(episode).chat.completions.parse(model="gpt-5", messages=user(episode), response_format=Total)
    return str(said.choices[0].message.parsed.total)


def openai_chat_tools(episode: Episode) -> str:
    client, messages = openai_client(episode), user(episode)
    for _ in range(3):
        said = client.chat.completions.create(
            model="gpt-5", messages=messages, tools=[{"type": "function", "function": LOOK}]
        )
        message = said.choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message)
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "7"} for call in message.tool_calls]
    return ""


def openai_responses(episode: Episode) -> str:
    said = openai_client(episode).responses.create(model="gpt-5", instructions="Be brief.", input=episode.task["question"])
    return said.output_text


def openai_responses_stream(episode: Episode) -> str:
    with openai_client(episode).responses.stream(model="gpt-5", input=episode.task["question"]) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text
    return text


def openai_responses_parse(episode: Episode) -> str:
    said = openai_client(episode).responses.parse(model="gpt-5", input=episode.task["question"], text_format=Total)
    return str(said.output_parsed.total)


def openai_responses_tools(episode: Episode) -> str:
    client, items = openai_client(episode), user(episode)
    for _ in range(3):
        said = client.responses.create(
            model="gpt-5", input=items, tools=[{"type": "function", **LOOK}], reasoning={"effort": "low"}
        )
        calls = [item for item in said.output if item.type == "function_call"]
        if not calls:
            return said.output_text
        items += said.output
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": "7"} for call in calls]
    return ""


def openai_responses_previous(episode: Episode) -> str:
    client = openai_client(episode)
    tools = [{"type": "function", **LOOK}]
    said = client.responses.create(model="gpt-5", input=episode.task["question"], tools=tools)
    results = [{"type": "function_call_output", "call_id": said.output[0].call_id, "output": "7"}]
    return client.responses.create(model="gpt-5", previous_response_id=said.id, input=results, tools=tools).output_text


def openai_computer_use(episode: Episode) -> str:
    screen = {"display_width": 1024, "display_height": 768, "environment": "browser"}
    tools = [{"type": "computer_use_preview", **screen}]
    said = openai_client(episode).responses.create(
        model="computer-use-preview", tools=tools, input=user(episode), truncation="auto"
    )
    return said.output_text


def anthropic_messages(episode: Episode) -> str:
    said = anthropic_client(episode).messages.create(model="claude-sonnet-5", max_tokens=1024, messages=user(episode))
    return said.content[0].text


def anthropic_stream(episode: Episode) -> str:
    with anthropic_client(episode).messages.stream(
        model="claude-sonnet-5", max_tokens=1024, messages=user(episode)
    ) as stream:
        return "".join(stream.text_stream)


def anthropic_count_tokens(episode: Episode) -> str:
    said = anthropic_client(episode).messages.count_tokens(model="claude-sonnet-5", messages=user(episode))
    return str(said.input_tokens)


def anthropic_parse(episode: Episode) -> str:
    said = anthropic_client(episode).messages.parse(
        model="claude-sonnet-5", max_tokens=1024, messages=user(episode), output_format=Total
    )
    return str(said.parsed_output.total)


def anthropic_tool_runner(episode: Episode) -> str:
    from anthropic import beta_tool

    @beta_tool
    def look(item: str) -> str:
        """The price of an item.

        Args:
            item: Which one.
        """
        return "7"

    runner = anthropic_client(episode).beta.messages.tool_runner(
        model="claude-sonnet-5", max_tokens=1024, tools=[look], messages=user(episode)
    )
    return runner.until_done().content[0].text


def anthropic_computer_use(episode: Episode) -> str:
    screen = {"display_width_px": 1024, "display_height_px": 768}
    said = anthropic_client(episode).beta.messages.create(
        model="claude-sonnet-5",
        max_tokens=1024,
        tools=[{"type": "computer_20251124", "name": "computer", **screen}],
        messages=user(episode),
        betas=["computer-use-2025-11-24"],
    )
    return said.content[0].text


def lite(episode: Episode, **more: Any) -> Any:
    import litellm

    keys = {"api_base": episode.base_url, "api_key": episode.api_key}
    return litellm.completion(model=f"openai/{episode.model}", messages=user(episode), **keys, **more)


def litellm_completion(episode: Episode) -> str:
    return lite(episode).choices[0].message.content


def litellm_greedy(episode: Episode) -> str:
    return lite(episode, temperature=0).choices[0].message.content


def litellm_stream(episode: Episode) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in lite(episode, stream=True))


def litellm_format(episode: Episode) -> str:
    return str(Total.model_validate_json(lite(episode, response_format=Total).choices[0].message.content).total)


def litellm_responses(episode: Episode) -> str:
    import litellm

    keys = {"api_base": episode.base_url, "api_key": episode.api_key}
    said = litellm.responses(model=f"openai/{episode.model}", input=episode.task["question"], **keys)
    return said.output[0].content[0].text


def litellm_anthropic(episode: Episode) -> str:
    import litellm

    keys = {"api_base": episode.base_url.removesuffix("/v1"), "api_key": episode.api_key}
    said = litellm.completion(model=f"anthropic/{episode.model}", messages=user(episode), **keys)
    return said.choices[0].message.content


def instructor_tools(episode: Episode) -> str:
    import instructor

    client = instructor.from_openai(openai_client(episode))
    return str(client.chat.completions.create(model="gpt-5", response_model=Total, messages=user(episode)).total)


def instructor_json(episode: Episode) -> str:
    import instructor

    client = instructor.from_openai(openai_client(episode), mode=instructor.Mode.JSON)
    return str(client.chat.completions.create(model="gpt-5", response_model=Total, messages=user(episode)).total)


def instructor_anthropic(episode: Episode) -> str:
    import instructor

    client = instructor.from_anthropic(anthropic_client(episode))
    messages = user(episode)
    return str(client.messages.create(model="c", max_tokens=64, response_model=Total, messages=messages).total)
