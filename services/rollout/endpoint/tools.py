"""Checks and normalises the tools that an agent offers to the model."""

import re
from typing import Any, Final

from gspo_services.rollout.endpoint.calls import CallRefused
from gspo_services.rollout.endpoint.fields import Fields, wrong

MAX_TOOLS: Final = 512
"""OpenAI allows 128. A prompt with more tools than this has room for little else."""
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)


class CheckedTools:
    """The tools of one call."""

    def __init__(self, plain: list[Any], path: str) -> None:
        """Raises: CallRefused."""
        self.tools: list[dict[str, Any]] = []
        self.has_strict = False
        """Whether a tool asks for arguments that match its schema exactly, which constrains the sampler."""
        names: set[str] = set()
        for index, one in enumerate(plain):
            where = f"{path}[{index}]"
            function = self._function(Fields(one, where))
            if function["name"] in names:
                name = f"{where}.function.name"
                raise CallRefused(400, "duplicate_tool", f"{name} is {function['name']} a second time", param=name)
            names.add(function["name"])
            self.tools.append({"type": "function", "function": function})

    def _function(self, tool: Fields) -> dict[str, Any]:
        kind = tool.value("type")
        if kind != "function":
            raise wrong(tool.path("type"), '"function", the only kind of tool that this endpoint has', kind)
        fields = Fields(tool.value("function"), tool.path("function"))
        name = fields.required_text("name")
        if not _NAME.fullmatch(name):
            raise wrong(fields.path("name"), "1 to 64 letters, digits, _ and -", name)
        self.has_strict |= bool(fields.flag("strict"))
        function: dict[str, Any] = {"name": name}
        description = fields.text("description")
        if description is not None:
            function["description"] = description
        function["parameters"] = _schema(fields)
        return function


def _schema(fields: Fields) -> dict[str, Any]:
    """Return the schema of a function's arguments; without one, or with an empty one, it takes none."""
    path = fields.path("parameters")
    schema = fields.free("parameters")
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
