"""The language of chat templates: Jinja in a sandbox, with what transformers adds to it.

It follows transformers' ``utils/chat_template_utils.py``, which a rollout does not import because that loads torch; a test
compares the two.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.runtime import Macro

from gspo_services.rollout.chat_template.errors import TokenizerError
from gspo_services.rollout.chat_template.files import TemplateText


class Generation(jinja2.ext.Extension):
    """``{% generation %}``: what the assistant says, which some trainers look for. Here its text is like any other.

    As in transformers it is a block of its own: variables set inside are gone after it.
    """

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """See ``jinja2.ext.Extension.parse``."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Macro) -> str:
        return caller()


def compile_template(template: TemplateText) -> jinja2.Template:
    """Compile a template. Raises: TokenizerError with file and line."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    try:
        return environment.from_string(template.text)
    except jinja2.TemplateSyntaxError as error:
        raise TokenizerError(
            f"{template.path}: chat template line {error.lineno}: {error}: correct the template, or copy the model's again"
        ) from error
    # The compiler is not written for every tree that the parser lets through.
    except Exception as error:
        raise TokenizerError(
            f"{template.path}: the chat template cannot be compiled: {type(error).__name__}: {error}: copy the model's again"
        ) from error


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter escapes for HTML. Templates pass these by place or by name."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(pattern: str) -> str:
    # Without a time zone, as transformers has it.
    return datetime.now().strftime(pattern)


def pinned_day(arguments: Mapping[str, Any]) -> datetime | None:
    """The day that ``date_string`` among a template's variables says, as Llama 3 writes it (26 Jul 2024) or as 2024-07-26.

    It is what ``strftime_now`` tells every template: Granite's has no variable of its own for it.
    """
    said = arguments.get("date_string")
    for form in ("%d %b %Y", "%d %B %Y", "%B %d, %Y", "%Y-%m-%d"):
        if isinstance(said, str):
            with suppress(ValueError):
                return datetime.strptime(said.strip(), form)
    return None
