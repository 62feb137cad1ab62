"""Checks and normalises the tools that an agent offers to the model."""

import re
from collections.abc import Callable
from typing import Any, Final

from gspo_services.rollout.endpoint.calls import CallRefused
from gspo_services.rollout.endpoint.fields import Fields, wrong

MAX_TOOLS: Final = 512
"""OpenAI allows 128. A prompt with more tools than this has room for little else."""
Located = Callable[[Fields], tuple[Fields, str]]
"""Where a dialect has a tool's name, and what it calls the schema of its arguments."""
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)


class CheckedTools:
    """The tools of one call."""

    def __init__(self, plain: list[Any], path: str, located: Located) -> None:
        """Raises: CallRefused."""
        self.tools: list[dict[str, Any]] = []
        self.has_strict = False
        """Whether a tool asks for arguments that match its schema exactly, which constrains the sampler."""
        names: set[str] = set()
        for index, one in enumerate(plain):
            where = f"{path}[{index}]"
            fields, schema = located(Fields(one, where))
            function = self._function(fields, schema)
            if function["name"] in names:
                name = fields.path("name")
                raise CallRefused(400, "duplicate_tool", f"{name} is {function['name']} a second time", param=name)
            names.add(function["name"])
            self.tools.append({"type": "function", "function": function})

    def _function(self, fields: Fields, schema: str) -> dict[str, Any]:
        name = fields.required_text("name")
        if not _NAME.fullmatch(name):
            raise wrong(fields.path("name"), "1 to 64 letters, digits, _ and -", name)
        self.has_strict |= bool(fields.flag("strict"))
        function: dict[str, Any] = {"name": name}
        description = fields.text("description")
        if description is not None:
            function["description"] = description
        function["parameters"] = _schema(fields, schema)
        return function


def inside_function(tool: Fields) -> tuple[Fields, str]:
    """Chat Completions: {"type": "function", "function": {"name", "parameters"}}. Raises: CallRefused."""
    _require_kind(tool, tool.value("type"), "function")
    return Fields(tool.value("function"), tool.path("function")), "parameters"


def flat(tool: Fields) -> tuple[Fields, str]:
    """Responses: {"type": "function", "name", "parameters"}. Raises: CallRefused."""
    _require_kind(tool, tool.value("type"), "function")
    return tool, "parameters"


def with_input_schema(tool: Fields) -> tuple[Fields, str]:
    """Messages: {"name", "input_schema"}. Raises: CallRefused."""
    _require_kind(tool, tool.value("type") or "custom", "custom")
    return tool, "input_schema"


def _require_kind(tool: Fields, kind: object, own: str) -> None:
    if kind != own:
        expected = (
            f'"{own}", the only kind of tool that this endpoint has: it runs none itself. Give its name and its schema'
        )
        raise wrong(tool.path("type"), expected, kind)


def _schema(fields: Fields, name: str) -> dict[str, Any]:
    """Return the schema of a function's arguments; without one, or with an empty one, it takes none."""
    path = fields.path(name)
    schema = fields.free(name)
    if not schema:
        return {"type": "object", "properties": {}}
    if schema.get("type") != "object":
        raise wrong(f"{path}.type", '"object": the arguments of a function are an object', schema.get("type"))
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        raise wrong(f"{path}.properties", "an object", properties)
    for name, one in properties.items():
        if not isinstance(one, dict | bool):
            raise wrong(f"{path}.properties.{name[:64]}", "a JSON schema", one)
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise wrong(f"{path}.required", "a list of names", required)
    return schema
