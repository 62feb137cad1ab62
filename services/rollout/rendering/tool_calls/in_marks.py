"""Calls in marks of their own, each with its arguments as JSON: DeepSeek, Kimi, Mistral, Phi."""

import re
from dataclasses import dataclass
from typing import Final

from gspo_services.rollout.rendering.interface import ParsedCall
from gspo_services.rollout.rendering.tool_calls.found import Found
from gspo_services.rollout.rendering.tool_calls.values import call_of, decode_json, make_call


@dataclass(frozen=True)
class Marks:
    """How a family writes calls."""

    opens: str
    closes: str
    """Empty where the block ends with the answer, or with the next one."""
    call: str = ""
    """What stands before the arguments; a pattern, and its group is the name. Empty: the block is a JSON list of calls."""
    ends: str = ""
    """What stands after the arguments; a pattern."""
    may_be_list: bool = False
    """The block may also be a JSON list of calls."""
    marks: tuple[str, ...] = ()
    """Other marks that are tokens of the family's vocabulary."""


DEEPSEEK: Final = Marks(
    opens="<｜tool▁calls▁begin｜>", closes="<｜tool▁calls▁end｜>",
    # The first form is that of V3 and R1, the second that of V3.1.
    call=r"\s*<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>([^\n<]+)\n```json\s*|([^\n<]+)<｜tool▁sep｜>)",
    ends=r"\s*(?:```)?<｜tool▁call▁end｜>", marks=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
)  # fmt: skip
KIMI: Final = Marks(
    opens="<|tool_calls_section_begin|>", closes="<|tool_calls_section_end|>",
    call=r"\s*<\|tool_call_begin\|>\s*(?:functions\.)?([^:<\s]+):\d+\s*<\|tool_call_argument_begin\|>",
    ends=r"\s*<\|tool_call_end\|>", marks=("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)  # fmt: skip
MISTRAL: Final = Marks(
    opens="[TOOL_CALLS]", closes="", call=r"\s*([^\s\[{]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?", may_be_list=True,
    marks=("[CALL_ID]", "[ARGS]"),
)  # fmt: skip
PHI: Final = Marks(opens="<|tool_call|>", closes="<|/tool_call|>", may_be_list=True)


def read_marks(text: str, marks: Marks) -> Found:
    """Read calls. A mark within a string of JSON closes nothing."""
    found = Found()
    position = 0
    while (begin := text.find(marks.opens, position)) >= 0:
        found.outside.append(text[position:begin])
        try:
            calls, position = _block(text, begin + len(marks.opens), marks)
        except ValueError as error:
            is_closed = marks.closes in text[begin:]
            found.give_up(text[begin:], f"a tool call cannot be read: {error}" if is_closed else "a tool call is not closed")
            return found
        found.calls += calls
    found.outside.append(text[position:])
    return found


def _block(text: str, position: int, marks: Marks) -> tuple[list[ParsedCall], int]:
    """Return the calls of a block, and where it ends. Raises: ValueError where the text leaves the format."""
    if marks.may_be_list and text[position:].lstrip().startswith("["):
        plain, position = decode_json(text, position)
        calls = [call_of(each, needs_arguments=False) for each in plain]
    else:
        calls, position = _named(text, position, marks)
    if not calls:
        raise ValueError("it has no name where the name stands")
    end = rf"\s*{re.escape(marks.closes)}" if marks.closes else rf"\s*(?={re.escape(marks.opens)}|\Z)"
    closed = re.compile(end).match(text, position)
    if closed is None:
        raise ValueError("there is text after its JSON")
    return calls, closed.end()


def _named(text: str, position: int, marks: Marks) -> tuple[list[ParsedCall], int]:
    calls: list[ParsedCall] = []
    if not marks.call:
        return calls, position
    while (header := re.compile(marks.call).match(text, position)) is not None:
        arguments, end = decode_json(text, header.end())
        if not isinstance(arguments, dict):
            raise ValueError("the arguments are not a JSON object")
        after = re.compile(marks.ends).match(text, end)
        if after is None:
            raise ValueError("there is text after its JSON")
        calls.append(make_call(next(group for group in header.groups() if group).strip(), arguments))
        position = after.end()
        if not marks.closes:
            break
    return calls, position
