"""Converts messages of OpenAI clients to the form that chat templates expect."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from gspo_services.rollout.rendering.interface import Arguments, Messages, RenderingError, Tools

RESERVED: Final = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables of every template that only the renderer sets."""


def for_template(messages: Messages) -> list[dict[str, Any]]:
    """Copies with text as content and with tool-call arguments as objects.

    Clients send null as the content of a message with tool calls, text in parts, and arguments as JSON text. Most templates
    expect none of these. Raises: RenderingError for content that is not text, and for invalid messages.
    """
    return [_message(index, message) for index, message in enumerate(messages)]


def with_text_arguments(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of messages of ``for_template`` with the arguments of tool calls as JSON text."""

    def text_call(call: Mapping[str, Any]) -> dict[str, Any]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": arguments}}

    return [
        {**message, "tool_calls": [text_call(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else {**message}
        for message in messages
    ]


def check_arguments(arguments: Arguments) -> None:
    """Raises: RenderingError when a template argument would replace what the renderer sets."""
    taken = [name for name in RESERVED if name in arguments]
    if taken:
        raise RenderingError(f"template argument {taken[0]!r} is set by the renderer: leave it out")


def check_tools(tools: Tools) -> None:
    """Raises: RenderingError for a tool that is not a function with a name."""
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RenderingError(f'tools[{index}]: expected {{"type": "function", "function": {{"name": ...}}}}')


def _message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RenderingError(f"messages[{index}]: expected an object with a role")
    copy = {**message, "content": _text(index, message.get("content"))}
    calls = message.get("tool_calls")
    if calls:
        copy["tool_calls"] = [_call(index, call) for call in calls]
    else:
        # Templates ask whether the key is there, and clients send it empty.
        copy.pop("tool_calls", None)
    return copy


def _text(index: int, content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content]
        if all(isinstance(text, str) for text in texts):
            return "".join(str(text) for text in texts)
    raise RenderingError(f"messages[{index}]: the content is not text; other content cannot be rendered")


def _call(index: int, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RenderingError(f"messages[{index}]: a tool call lacks a named function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise RenderingError(f"messages[{index}]: the arguments of a tool call are not JSON: {error}") from error
    return {**call, "function": {**function, "arguments": arguments or {}}}
