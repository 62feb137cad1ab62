"""The format in which a model writes tool calls, found in its chat template."""

from collections.abc import Mapping
from typing import Final, Literal

from gspo_services.rollout.rendering.interface import ParsedCall, Tools
from gspo_services.rollout.rendering.tool_calls import in_json, in_marks, in_python, in_tags
from gspo_services.rollout.rendering.tool_calls.found import Found

Format = Literal[
    "tags", "json", "function", "arg_key", "tool_sep", "invoke", "deepseek", "kimi", "mistral", "phi", "python", "none"
]  # fmt: skip
CALL_IS_ANSWER: Final = ("json",)
"""Formats in which a call is a whole answer, without a mark."""
_IN_TAGS: Final[Mapping[Format, in_tags.Tags]] = {
    "function": in_tags.FUNCTION,
    "arg_key": in_tags.ARG_KEY,
    "tool_sep": in_tags.TOOL_SEP,
    "invoke": in_tags.INVOKE,
}

_IN_MARKS: Final[Mapping[Format, in_marks.Marks]] = {
    "deepseek": in_marks.DEEPSEEK,
    "kimi": in_marks.KIMI,
    "mistral": in_marks.MISTRAL,
    "phi": in_marks.PHI,
}


def format_of(template: str) -> Format:
    """Return the format of tool calls that ``template`` shows to the model.

    ``tags`` is ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` (Hermes, Qwen 2.5 and 3), ``json`` is an answer
    that is ``{"name": ..., "parameters": {...}}`` (Llama 3), ``python`` is ``[name(key='value')]`` in marks (LFM2). In the
    others each call has marks of its own (``in_marks.py``), or each argument (``in_tags.py``). With any other, tool calls
    are plain text.
    """
    for name, marks in _IN_MARKS.items():
        if marks.opens in template:
            return name
    if in_python.OPEN in template:
        return "python"
    if in_tags.INVOKE.opens in template:
        return "invoke"
    if in_json.OPEN in template:
        if "<function=" in template:
            return "function" if "<parameter=" in template else "none"
        if "<arg_key>" in template:
            return "tool_sep" if "<tool_sep>" in template else "arg_key"
        return "tags" if "arguments" in template else "none"
    return "json" if '"parameters"' in template and '"name"' in template else "none"


def openers_of(written: Format) -> tuple[str, ...]:
    """Return the texts that begin a call; none where a call is the whole answer, or calls are plain text."""
    if written in _IN_TAGS:
        return (_IN_TAGS[written].opens,)
    if written in _IN_MARKS:
        return (_IN_MARKS[written].opens,)
    return {"tags": (in_json.OPEN,), "python": (in_python.OPEN,)}.get(written, ())


def marks_of(written: Format) -> tuple[str, ...]:
    """Return the other texts of a call that may be tokens of their own, special ones too."""
    if written in _IN_TAGS:
        return (_IN_TAGS[written].closes, *_IN_TAGS[written].marks)
    if written in _IN_MARKS:
        closes = _IN_MARKS[written].closes
        return (*([closes] if closes else []), *_IN_MARKS[written].marks)
    return {"tags": (in_json.CLOSE,), "python": (in_python.CLOSE,)}.get(written, ())


def find_calls(text: str, written: Format, tools: Tools = ()) -> tuple[str, list[ParsedCall], str | None]:
    """Return the text outside tool calls, the calls, and what is wrong with the first unreadable one.

    An unreadable call, and what follows it, stays in the text. ``tools`` say which arguments are text, in formats that do
    not.
    """
    found = _found(text, written, tools)
    return found.text, found.calls, found.problem


def _found(text: str, written: Format, tools: Tools) -> Found:
    match written:
        case "tags":
            return in_json.read_tagged(text)
        case "json":
            return in_json.read_bare(text)
        case "python":
            return in_python.read_python(text)
        case "none":
            return Found(outside=[text])
    if written in _IN_MARKS:
        return in_marks.read_marks(text, _IN_MARKS[written])
    return in_tags.read_tags(text, _IN_TAGS[written], tools)
