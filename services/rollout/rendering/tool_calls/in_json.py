"""Calls that are JSON objects: in tags (Hermes, Qwen 2.5 and 3), or as the whole answer (Llama 3)."""

from collections.abc import Iterator
from typing import Any, Final

from gspo_services.rollout.rendering.tool_calls.found import Found
from gspo_services.rollout.rendering.tool_calls.values import call_of, decode_json

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
PYTHON_TAG: Final = "<|python_tag|>"
"""What Llama 3 may write before a call."""


def read_tagged(text: str) -> Found:
    """Read ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``. A closing tag within a string closes nothing."""
    found = Found()
    position = 0
    while (begin := text.find(OPEN, position)) >= 0:
        found.outside.append(text[position:begin])
        try:
            plain, end = decode_json(text, begin + len(OPEN))
            after = text[end:].lstrip()
            if not after.startswith(CLOSE):
                raise ValueError("there is text after its JSON" if CLOSE in after else "it is not closed")
            found.calls.append(call_of(plain, needs_arguments=False))
        except ValueError as error:
            is_closed = CLOSE in text[begin:]
            found.give_up(text[begin:], f"a tool call cannot be read: {error}" if is_closed else "a tool call is not closed")
            return found
        position = len(text) - len(after) + len(CLOSE)
    found.outside.append(text[position:])
    return found


def read_bare(text: str) -> Found:
    """Read an answer that is ``{"name": ..., "parameters": {...}}``, or several of these with semicolons between them."""
    stripped = text.strip().removeprefix(PYTHON_TAG).lstrip()
    if not stripped.startswith("{") or '"name"' not in stripped:
        return Found(outside=[text])
    try:
        return Found(calls=[call_of(plain, needs_arguments=True) for plain in _objects(stripped)])
    except ValueError as error:
        return Found(outside=[text], problem=f"a tool call cannot be read: {error}")


def _objects(text: str) -> Iterator[Any]:
    position = 0
    while position < len(text):
        plain, end = decode_json(text, position)
        yield plain
        rest = text[end:].lstrip()
        if rest and not rest.startswith(";"):
            raise ValueError("text after the call")
        position = len(text) - len(rest) + 1
