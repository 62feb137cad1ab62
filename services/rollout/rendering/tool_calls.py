"""Tool calls in the text of an answer, in the formats that a chat template can show. Pure."""

import json
from collections.abc import Iterator
from typing import Any, Final, Literal, NoReturn

from gspo_services.rollout.rendering.interface import ParsedCall

Format = Literal["tags", "json", "none"]
OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"


def format_of(template: str) -> Format:
    """Return the format of tool calls that ``template`` shows to the model.

    ``tags`` is ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` (Hermes, Qwen 2.5 and 3), ``json`` is an answer
    that is ``{"name": ..., "parameters": {...}}`` (Llama 3). With any other, tool calls are plain text.
    """
    if OPEN in template and "arguments" in template and "<function=" not in template and "<arg_key>" not in template:
        return "tags"
    if OPEN not in template and '"parameters"' in template and '"name"' in template:
        return "json"
    return "none"


def find_calls(text: str, written: Format) -> tuple[str, list[ParsedCall], str | None]:
    """Return the text outside tool calls, the calls, and what is wrong with the first invalid one.

    An invalid call stays in the text.
    """
    if written == "tags":
        return _tagged(text)
    if written == "json":
        return _bare(text)
    return text, [], None


def make_call(name: object, arguments: object) -> ParsedCall:
    """Make a call. Raises: ValueError for values that OpenAI's API cannot carry."""
    if not isinstance(name, str) or not name:
        raise ValueError("the function has no name")
    name.encode()
    if isinstance(arguments, str):
        # Some models write the arguments as JSON in a JSON string, because OpenAI's API has them so.
        arguments = _load(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("the arguments are not a JSON object")
    try:
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        written.encode()
    except UnicodeEncodeError:
        # A lone surrogate, which JSON can escape but UTF-8 cannot encode.
        written = json.dumps(arguments, allow_nan=False)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    return ParsedCall(name=name, arguments_json=written)


def _tagged(text: str) -> tuple[str, list[ParsedCall], str | None]:
    outside: list[str] = []
    calls: list[ParsedCall] = []
    problem = None
    position = 0
    while (begin := text.find(OPEN, position)) >= 0:
        end = text.find(CLOSE, begin)
        if end < 0:
            problem = problem or "a tool call is not closed"
            break
        outside.append(text[position:begin])
        position = end + len(CLOSE)
        try:
            plain = _load(text[begin + len(OPEN) : end])
            if not isinstance(plain, dict):
                raise ValueError("not a JSON object")
            calls.append(make_call(plain.get("name"), plain.get("arguments", {})))
        except ValueError as error:
            problem = problem or f"a tool call cannot be read: {error}"
            outside.append(text[begin:position])
    outside.append(text[position:])
    if calls:
        # Newlines between calls belong to the format.
        outside = [piece for piece in outside if piece.strip()]
    return "".join(outside), calls, problem


def _bare(text: str) -> tuple[str, list[ParsedCall], str | None]:
    stripped = text.strip()
    if not stripped.startswith("{") or '"name"' not in stripped:
        return text, [], None
    try:
        calls = [make_call(plain.get("name"), plain["parameters"]) for plain in _objects(stripped)]
    except (ValueError, KeyError) as error:
        return text, [], f"a tool call cannot be read: {error}"
    return "", calls, None


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """JSON objects with semicolons between them. Raises: ValueError."""
    decoder = json.JSONDecoder(parse_constant=_no_constant)
    while text:
        try:
            plain, end = decoder.raw_decode(text)
        except RecursionError as error:
            raise ValueError("nested too deep") from error
        if not isinstance(plain, dict):
            raise ValueError("not a JSON object")
        yield plain
        text = text[end:].lstrip()
        if text and not text.startswith(";"):
            raise ValueError("text after the call")
        text = text[1:].lstrip()


def _load(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
