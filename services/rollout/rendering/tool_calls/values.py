"""Names and arguments of tool calls as OpenAI's API carries them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

from gspo_services.rollout.rendering.interface import ParsedCall, Tools

ARGUMENTS: Final = ("arguments", "parameters")
"""Keys for the arguments: families write the first or the second, and models mix them up."""
_OTHERS: Final = ("name", "id", "type")
_TYPES: Final[Mapping[str, type | tuple[type, ...]]] = {
    "boolean": bool, "integer": int, "number": (int, float), "array": list, "object": dict, "null": type(None),
}  # fmt: skip


class RepeatedKey(ValueError):
    """A JSON object has one key twice, so that it is unknown which value is meant."""


def make_call(name: object, arguments: object) -> ParsedCall:
    """Make a call. Raises: ValueError for values that OpenAI's API cannot carry."""
    if not isinstance(name, str) or not name:
        raise ValueError("the function has no name")
    name.encode()
    if isinstance(arguments, str):
        # Some models write the arguments as JSON in a JSON string, because OpenAI's API has them so.
        arguments = load_json(arguments)
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


def call_of(plain: object, *, needs_arguments: bool) -> ParsedCall:
    """Make a call of ``{"name": ..., "arguments": {...}}``, where the second key may be ``parameters``.

    Raises: ValueError for an object with other keys, whose values would be lost.
    """
    if not isinstance(plain, dict):
        raise ValueError("not a JSON object")
    given = [key for key in ARGUMENTS if key in plain]
    if len(given) > 1:
        raise ValueError("it has both arguments and parameters")
    unknown = [key for key in plain if key not in (*_OTHERS, *given)]
    if unknown:
        raise ValueError(f"it has the key {unknown[0][:40]!r}, which is not one of name, {' and '.join(ARGUMENTS)}")
    if not given and needs_arguments:
        raise ValueError("it has no parameters")
    return make_call(plain.get("name"), plain[given[0]] if given else {})


def load_json(text: str) -> Any:
    """Read JSON. Raises: ValueError, also for NaN and for an object that has a key twice."""
    try:
        return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_unique)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def decode_json(text: str, begin: int) -> tuple[Any, int]:
    """Read the JSON value at ``begin``, after whitespace; returns it, and where it ends. Raises: ValueError."""
    while begin < len(text) and text[begin] in " \t\r\n":
        begin += 1
    try:
        plain, end = json.JSONDecoder(parse_constant=_no_constant, object_pairs_hook=_unique).raw_decode(text, begin)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    return plain, end


def has_repeated_key(text: str) -> bool:
    """Return whether the JSON object in ``text``, if there is one, has a key twice."""
    begin = text.find("{")
    try:
        decode_json(text, max(begin, 0))
    except RepeatedKey:
        return True
    except ValueError:
        return False
    return False


def schema_of(tools: Tools, name: str, key: str) -> Mapping[str, Any]:
    """Return the JSON schema of one argument of a tool; empty where it has none."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            schema = properties.get(key) if isinstance(properties, Mapping) else None
            return schema if isinstance(schema, Mapping) else {}
    return {}


def typed(text: str, schema: Mapping[str, Any]) -> Any:
    """Return an argument that its format writes without quotes, by the schema of its tool.

    Text where only text is allowed; JSON where it is not; where both are, JSON only of another allowed type. Without a
    schema JSON if it is some. Raises: ValueError for what is neither JSON nor may be text.
    """
    types = _types(schema)
    if types == {"string"}:
        return text
    try:
        value = load_json(text)
    except RepeatedKey:
        raise
    except ValueError:
        if types and "string" not in types:
            raise
        return text
    if "string" in types and not any(_is_of(value, each) for each in types - {"string"}):
        return text
    return value


def _types(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema names; empty where it names none."""
    declared = schema.get("type")
    found = set(declared if isinstance(declared, list) else [declared] if isinstance(declared, str) else [])
    for key in ("anyOf", "oneOf"):
        branches = schema.get(key)
        for branch in branches if isinstance(branches, Sequence) else ():
            found |= _types(branch) if isinstance(branch, Mapping) else set()
    choices = schema.get("enum")
    if not found and isinstance(choices, list) and choices and all(isinstance(each, str) for each in choices):
        return {"string"}
    return {each for each in found if isinstance(each, str)}


def _is_of(value: Any, name: str) -> bool:
    expected = _TYPES.get(name)
    if expected is None or (isinstance(value, bool) and name != "boolean"):
        return False
    return isinstance(value, expected)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    plain = dict(pairs)
    if len(plain) < len(pairs):
        raise RepeatedKey("an object has a key twice")
    return plain


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
