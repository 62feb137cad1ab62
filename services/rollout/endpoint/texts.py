"""Reads text and arguments out of messages, for every dialect."""

from collections.abc import Sequence
from typing import Any, Final

from gspo_services.rollout.endpoint.calls import CallRefused
from gspo_services.rollout.endpoint.fields import Fields, check_depth, decode, wrong

PREFILLED: Final = "the model would continue text that it did not sample, so the turn could not be trained exactly"
TEXT_ONLY: Final = "the model of this run reads text only"
TEXT: Final = ("text",)


def text_of(fields: Fields, name: str = "content", kinds: Sequence[str] = TEXT) -> str | None:
    """Return a string, or a list of text parts as one: joined without a separator, so that the prompt has exactly the
    agent's text. ``kinds``: the types that a part of text may have. Raises: CallRefused.
    """
    content = fields.value(name)
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(fields.path(name), "a string or a list of text parts", content)
    return "".join(part_text(Fields(one, f"{fields.path(name)}[{at}]"), kinds) for at, one in enumerate(content))


def part_text(part: Fields, kinds: Sequence[str] = TEXT) -> str:
    """Return the text of one part. Raises: CallRefused for one of another kind, such as an image."""
    kind = part.value("type")
    if kind not in kinds:
        named = " or ".join(f'"{each}"' for each in kinds)
        raise wrong(part.path("type"), f"{named}: {TEXT_ONLY}", kind)
    text = part.text("text")
    if text is None:
        raise wrong(part.path("text"), "a string", None)
    return text


def arguments_text(function: Fields, name: str = "arguments") -> str:
    """Return the text of a JSON object; clients send an empty text for a function without arguments. Raises: CallRefused."""
    path = function.path(name)
    text = function.text(name)
    if text is None:
        raise wrong(path, "the text of a JSON object", None)
    if not text.strip():
        return "{}"
    try:
        arguments = decode(text)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise wrong(path, "the text of a JSON object", text)
    check_depth(arguments, path)
    return text


def tool_call(name: str, function: str, arguments: str) -> dict[str, Any]:
    """Return a call of a tool as ``CallRequest.messages`` has it; ``name`` is its id."""
    return {"id": name, "type": "function", "function": {"name": function, "arguments": arguments}}


def assistant(content: str | None, calls: list[dict[str, Any]], reasoning: str | None) -> dict[str, Any]:
    """Return an assistant's message as ``CallRequest.messages`` has it. An answer with only reasoning has no content either,
    and comes back as it was.
    """
    message: dict[str, Any] = {"role": "assistant", "content": content if calls else content or ""}
    if calls:
        message["tool_calls"] = calls
    if reasoning:
        message["reasoning_content"] = reasoning
    return message


def require_unique(name: str, ids: set[str], path: str) -> None:
    """Raises: CallRefused when a call of a tool has the id of another one."""
    if name in ids:
        raise CallRefused(400, "duplicate_id", f"{path} is {name[:64]!r} a second time", param=path)
    ids.add(name)


def require_messages(messages: Sequence[dict[str, Any]], path: str) -> None:
    """Raises: CallRefused when there is no message. After one of the assistant's the model takes another turn, as OpenAI's
    do."""
    if not messages:
        raise CallRefused(400, "invalid_value", f"{path} is empty: a call needs at least one message", param=path)
