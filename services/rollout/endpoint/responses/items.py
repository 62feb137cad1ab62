"""Turns the items of a response's input into messages."""

from typing import Any, Final

from gspo_services.rollout.endpoint.calls import CallRefused
from gspo_services.rollout.endpoint.fields import Fields, wrong
from gspo_services.rollout.endpoint.texts import (
    arguments_text,
    assistant,
    require_messages,
    require_unique,
    text_of,
    tool_call,
)

_ROLES: Final = ("system", "developer", "user", "assistant")
_SAID: Final = ("text", "input_text", "output_text")
_KINDS: Final = ("message", "function_call", "function_call_output", "reasoning")


def messages_of(fields: Fields, before: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], set[str]]:
    """Return the messages of ``instructions`` and ``input``, with the names of the items' unknown fields.

    ``before``: those that ``previous_response_id`` stands for. Raises: CallRefused.
    """
    instructions = fields.text("instructions")
    head = [{"role": "system", "content": instructions}] if instructions else []
    said = fields.value("input")
    if isinstance(said, str):
        return [*head, *before, {"role": "user", "content": said}], set()
    if not isinstance(said, list):
        raise wrong("input", "a string or a list of items", said)
    items = Items()
    for index, one in enumerate(said):
        items.add(Fields(one, f"input[{index}]"))
    messages = [*head, *before, *items.messages()]
    require_messages(messages, "input")
    return messages, items.unknown


class Items:
    """Items, gathered into messages: one of the assistant is its reasoning, its text and its calls."""

    def __init__(self) -> None:
        self.unknown: set[str] = set()
        self._done: list[dict[str, Any]] = []
        self._content: str | None = None
        self._reasoning: str | None = None
        self._calls: list[dict[str, Any]] = []
        self._ids: set[str] = set()

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages of all items."""
        self._close()
        return self._done

    def add(self, item: Fields) -> None:
        """Add the next item. Raises: CallRefused."""
        kind = item.value("type") or "message"
        if kind not in _KINDS:
            text = f"one of {', '.join(_KINDS)}: this endpoint answers with no other items, and keeps none by their ids"
            raise wrong(item.path("type"), text, kind)
        # The names of items, and how far they had come, when this endpoint or another gave them.
        item.value("id"), item.value("status")
        {
            "message": self._message, "function_call": self._call, "function_call_output": self._result,
            "reasoning": self._thought,
        }[kind](item)  # fmt: skip
        self.unknown |= {f"input[].{name}" for name in item.unknown}

    def _message(self, item: Fields) -> None:
        role = item.value("role")
        if role not in _ROLES:
            raise wrong(item.path("role"), f"one of {', '.join(_ROLES)}", role)
        content = text_of(item, kinds=_SAID)
        if content is None:
            raise wrong(item.path("content"), "a string or a list of text parts", None)
        if role != "assistant":
            self._close()
            self._done.append({"role": role, "content": content})
            return
        item.value("phase")
        if self._content is not None or self._calls:
            self._close()
        self._content = content

    def _thought(self, item: Fields) -> None:
        self._close()
        item.value("encrypted_content"), item.value("summary")
        self._reasoning = text_of(item, kinds=("reasoning_text", "text")) or None

    def _call(self, item: Fields) -> None:
        name = item.required_text("call_id")
        require_unique(name, self._ids, item.path("call_id"))
        self._calls.append(tool_call(name, item.required_text("name"), arguments_text(item)))

    def _result(self, item: Fields) -> None:
        self._close()
        name, output = item.required_text("call_id"), text_of(item, "output", kinds=_SAID)
        if output is None:
            raise wrong(item.path("output"), "a string or a list of text parts", None)
        self._done.append({"role": "tool", "content": output, "tool_call_id": name})

    def _close(self) -> None:
        """End the assistant's message, if one is open.."""
        if self._content is not None or self._calls or self._reasoning:
            self._done.append(assistant(self._content, self._calls, self._reasoning))
        self._content, self._reasoning, self._calls = None, None, []


def refuse_stored(fields: Fields) -> None:
    """Raises: CallRefused for what only OpenAI's own store has."""
    for name in ("conversation", "prompt"):
        if fields.value(name) is not None:
            text = f"{name} is not supported: this endpoint has none stored. Give the messages as input"
            raise CallRefused(400, "unsupported_value", text, param=name)
    if fields.flag("background"):
        text = "background is not supported: a call is answered while its agent waits. Leave it out, or stream"
        raise CallRefused(400, "unsupported_value", text, param="background")
