"""Calls that are written as Python's: LFM2."""

import ast
from typing import Any, Final

from gspo_services.rollout.rendering.interface import ParsedCall
from gspo_services.rollout.rendering.tool_calls.found import Found
from gspo_services.rollout.rendering.tool_calls.values import make_call

OPEN: Final = "<|tool_call_start|>"
CLOSE: Final = "<|tool_call_end|>"
_JSON_NAMES: Final = {"true": True, "false": False, "null": None}
_MOST_TRIED: Final = 16
"""Closing marks that are tried: those before the last one would stand in strings."""
_MOST_CHARACTERS: Final = 50_000
"""Python's parser uses much memory for its text."""


def read_python(text: str) -> Found:
    """Read ``<|tool_call_start|>[name(key='value', ...), ...]<|tool_call_end|>``."""
    found = Found()
    position = 0
    while (begin := text.find(OPEN, position)) >= 0:
        found.outside.append(text[position:begin])
        try:
            calls, position = _block(text, begin + len(OPEN))
        except ValueError as error:
            is_closed = CLOSE in text[begin:]
            found.give_up(text[begin:], f"a tool call cannot be read: {error}" if is_closed else "a tool call is not closed")
            return found
        found.calls += calls
    found.outside.append(text[position:])
    return found


def _block(text: str, begin: int) -> tuple[list[ParsedCall], int]:
    end, problem = begin, ValueError("not a list of calls")
    for _ in range(_MOST_TRIED):
        end = text.find(CLOSE, end)
        if end < 0:
            break
        try:
            return _calls(text[begin:end]), end + len(CLOSE)
        except ValueError as error:
            problem = error
        end += len(CLOSE)
    raise problem


def _calls(source: str) -> list[ParsedCall]:
    # The template writes strings without escaping them, and Python would read an escape.
    if "\\" in source:
        raise ValueError("it has a backslash, which may be one or begin an escape")
    if len(source) > _MOST_CHARACTERS:
        raise ValueError("it is too long")
    try:
        tree = ast.parse(source.strip(), mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            raise ValueError("not a list of calls")
        return [_call(each, source.strip()) for each in tree.elts]
    except SyntaxError as error:
        raise ValueError(str(error.msg)) from error
    except (RecursionError, MemoryError) as error:
        raise ValueError("nested too deep") from error


def _call(node: ast.expr, source: str) -> ParsedCall:
    if not isinstance(node, ast.Call) or node.args or not all(each.arg for each in node.keywords):
        raise ValueError("not a call with named arguments")
    names = [each.arg for each in node.keywords]
    if len(set(names)) < len(names):
        raise ValueError("it has an argument twice")
    return make_call(ast.unparse(node.func), {str(each.arg): _value(each.value, source) for each in node.keywords})


def _value(node: ast.expr, source: str) -> Any:
    match node:
        case ast.Constant(value=str() as text):
            # Python joins texts side by side; here the first one's end stands in a text that is not escaped.
            if (ast.get_source_segment(source, node) or "")[1:-1] != text:
                raise ValueError("a text has a quote inside")
            return text
        case ast.Constant(value=bool() | int() | float() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)) if not isinstance(value, bool):
            return -value
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_value(each, source) for each in elements]
        case ast.Dict(keys=keys, values=values):
            names = [None if key is None else _value(key, source) for key in keys]
            if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
                raise ValueError("an object has a key twice, or one that is not text")
            return dict(zip(names, (_value(each, source) for each in values), strict=True))
    raise ValueError("an argument is not a plain value")
