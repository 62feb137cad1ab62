"""Checks what clients send before it is rendered."""

from collections.abc import Mapping
from typing import Any

from gspo_services.rollout.chat_template import TokenizerError, for_template, require_arguments
from gspo_services.rollout.rendering.interface import Arguments, Messages, RenderingError, Tools


def plain_messages(messages: Messages) -> list[dict[str, Any]]:
    """Return messages as most templates take them. Raises: RenderingError for content that is not text, and for others."""
    try:
        return for_template(messages)
    except TokenizerError as error:
        raise RenderingError(str(error)) from error


def check_arguments(arguments: Arguments) -> None:
    """Raises: RenderingError when a template argument would replace what the renderer sets."""
    try:
        require_arguments(arguments)
    except TokenizerError as error:
        raise RenderingError(str(error)) from error


def check_tools(tools: Tools) -> None:
    """Raises: RenderingError for a tool that is not a function with a name."""
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RenderingError(f'tools[{index}]: expected {{"type": "function", "function": {{"name": ...}}}}')
