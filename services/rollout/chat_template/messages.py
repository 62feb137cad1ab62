"""Messages of rows, environments and OpenAI clients in the form that a chat template expects."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from gspo_services.rollout.chat_template.errors import TokenizerError

RESERVED: Final = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables of every template that only the renderer sets."""


def require_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises: TokenizerError when a template argument would replace what the renderer sets."""
    taken = [name for name in RESERVED if name in arguments]
    if taken:
        raise TokenizerError(f"template argument {taken[0]!r} is set by the renderer: leave it out")


def for_template(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies with text as content and with tool-call arguments as objects.

    Clients send null as the content of a message with tool calls, text in parts, and arguments as JSON text. Most templates
    expect none of these. Raises: TokenizerError for content that is not text, and for invalid messages.
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


def with_parts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of messages of ``for_template`` with their content as one part, as models of images and text take it."""
    return [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]


def _message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise TokenizerError(f"messages[{index}]: expected an object with a role")
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
    raise TokenizerError(f"messages[{index}]: the content is not text; images and other content are not trained on")


def _call(index: int, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise TokenizerError(f"messages[{index}]: a tool call lacks a named function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise TokenizerError(f"messages[{index}]: the arguments of a tool call are not JSON: {error}") from error
    return {**call, "function": {**function, "arguments": arguments or {}}}
