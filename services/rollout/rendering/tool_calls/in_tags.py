"""Calls whose arguments stand in tags of their own, unquoted: Qwen 3.5, Nemotron, GLM, MiniMax, Hunyuan."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from gspo_services.rollout.rendering.interface import ParsedCall, Tools
from gspo_services.rollout.rendering.tool_calls.found import Found
from gspo_services.rollout.rendering.tool_calls.values import make_call, schema_of, typed


@dataclass(frozen=True)
class Tags:
    """How a family writes calls. Patterns have one group: a name."""

    opens: str
    closes: str
    call: str
    """Where a call begins."""
    key: str
    """Where an argument begins."""
    value_closes: str
    call_closes: str
    """Empty where a block has one call."""
    marks: tuple[str, ...] = ()
    """Tags within a call that are tokens of the family's vocabulary."""
    has_lines: bool = False
    """A value stands on lines of its own."""


_ARG_MARKS: Final = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
FUNCTION: Final = Tags(
    opens="<tool_call>", closes="</tool_call>", call=r"\s*<function=([^>\n]+)>", key=r"\s*<parameter=([^>\n]+)>",
    value_closes="</parameter>", call_closes="</function>", has_lines=True,
)  # fmt: skip
ARG_KEY: Final = Tags(
    opens="<tool_call>", closes="</tool_call>", call=r"\s*([^<\s]+)", key=r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>",
    value_closes="</arg_value>", call_closes="", marks=_ARG_MARKS,
)  # fmt: skip
TOOL_SEP: Final = Tags(
    opens="<tool_calls>", closes="</tool_calls>", call=r"\s*<tool_call>\s*([^<\s]+)\s*<tool_sep>",
    key=r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>", value_closes="</arg_value>", call_closes="</tool_call>",
    marks=("<tool_call>", "<tool_sep>", "</tool_call>", *_ARG_MARKS),
)  # fmt: skip
INVOKE: Final = Tags(
    opens="<minimax:tool_call>", closes="</minimax:tool_call>", call=r'\s*<invoke name="([^"\n]+)">',
    key=r'\s*<parameter name="([^"\n]+)">', value_closes="</parameter>", call_closes="</invoke>",
)  # fmt: skip


def read_tags(text: str, tags: Tags, tools: Tools) -> Found:
    """Read calls. A closing tag within a value closes it only where the format can go on after it.

    The formats have no quotes. So an answer whose tags do not come out even is not read: a value may be cut in it.
    """
    found = Found()
    position = 0
    while (begin := text.find(tags.opens, position)) >= 0:
        found.outside.append(text[position:begin])
        try:
            calls, end = _Block(text, tags, tools).read(begin + len(tags.opens))
            following = text.find(tags.opens, end)
            between = text[end : following if following >= 0 else None]
            stray = next((each for each in _closers(tags) if each in between), None)
            if stray is not None:
                raise ValueError(f"{stray} stands after its end")
        except ValueError as error:
            is_closed = tags.closes in text[begin:]
            found.give_up(text[begin:], f"a tool call cannot be read: {error}" if is_closed else "a tool call is not closed")
            return found
        found.calls += calls
        position = end
    found.outside.append(text[position:])
    return found


def _closers(tags: Tags) -> Iterator[str]:
    yield from (each for each in (tags.closes, tags.call_closes, tags.value_closes) if each)


class _Block:
    """One block of calls. Raises: ValueError where the text leaves the format."""

    def __init__(self, text: str, tags: Tags, tools: Tools) -> None:
        self._text = text
        self._tags = tags
        self._tools = tools
        # After a value comes another one; or the end of the call, and then another call or the end of the block.
        end = rf"\s*{re.escape(tags.closes)}"
        if tags.call_closes:
            end = rf"\s*{re.escape(tags.call_closes)}(?:{end}|{tags.call})"
        self._goes_on = re.compile(rf"(?:{tags.key}|{end})")

    def read(self, position: int) -> tuple[list[ParsedCall], int]:
        """Return the calls, and where the block ends."""
        calls: list[ParsedCall] = []
        while True:
            end = self._skipped(self._tags.closes, position)
            if end is not None and calls:
                return calls, end
            header = re.compile(self._tags.call).match(self._text, position)
            if header is None or (calls and not self._tags.call_closes):
                raise ValueError("it has no name where the name stands" if not calls else "it has text between its calls")
            call, position = self._call(header.group(1).strip(), header.end())
            calls.append(call)

    def _call(self, name: str, position: int) -> tuple[ParsedCall, int]:
        arguments: dict[str, Any] = {}
        key_pattern = re.compile(self._tags.key)
        while (opened := key_pattern.match(self._text, position)) is not None:
            key = opened.group(1).strip()
            if key in arguments:
                raise ValueError(f"it has the argument {key[:40]!r} twice")
            value, position = self._value(opened.end())
            arguments[key] = typed(value, schema_of(self._tools, name, key))
        end = self._skipped(self._tags.call_closes, position)
        if end is None:
            raise ValueError("it has text between its arguments")
        return make_call(name, arguments), end

    def _value(self, begin: int) -> tuple[str, int]:
        end = self._text.find(self._tags.value_closes, begin)
        while end >= 0:
            after = end + len(self._tags.value_closes)
            if self._goes_on.match(self._text, after) is not None:
                value = self._text[begin:end]
                if self._tags.has_lines:
                    value = value.removeprefix("\n").removesuffix("\n")
                return value, after
            end = self._text.find(self._tags.value_closes, after)
        raise ValueError("an argument is not closed")

    def _skipped(self, literal: str, position: int) -> int | None:
        """Return the position after whitespace and ``literal``; None where it does not stand there."""
        found = re.compile(rf"\s*{re.escape(literal)}").match(self._text, position)
        return None if found is None else found.end()
