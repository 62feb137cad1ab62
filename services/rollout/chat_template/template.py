"""A model's chat template: conversations to text, in the form in which this template takes messages."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from gspo_services.rollout.chat_template.errors import TokenizerError
from gspo_services.rollout.chat_template.files import DEFAULT, WITH_TOOLS, read_templates
from gspo_services.rollout.chat_template.language import compile_template, pinned_day
from gspo_services.rollout.chat_template.messages import for_template, with_parts, with_text_arguments

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
Arguments = Mapping[str, Any]
Form = Callable[[Messages], list[dict[str, Any]]]
NO_ARGUMENTS: Final[Arguments] = {}
SENTINEL: Final = "\u0001gspo\u0001"
"""The content of the assistant's turn when an observation is rendered alone; no template or text contains it."""
_MARK: Final = "gspo\u0001mark"
_TOOLS: Final = [
    {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}}
]


class ChatTemplate:
    """The templates of one model directory."""

    def __init__(self, directory: Path, config: Mapping[str, Any], specials: Mapping[str, str]) -> None:
        """``config``: tokenizer_config.json. ``specials``: tokens that templates know by name. Raises: TokenizerError."""
        templates = read_templates(directory, config)
        self._specials = dict(specials)
        self._texts = templates
        self._compiled = {name: compile_template(each) for name, each in templates.items() if name in (DEFAULT, WITH_TOOLS)}

    @property
    def source(self) -> str:
        """Return the text of the template for conversations with tools."""
        return self._texts[WITH_TOOLS if WITH_TOOLS in self._texts else DEFAULT].text

    @property
    def sources(self) -> str:
        """Return the texts of all templates that are used."""
        return "\n".join(self._texts[name].text for name in self._compiled)

    def render(
        self,
        messages: Messages,
        tools: Tools = (),
        arguments: Arguments = NO_ARGUMENTS,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Render messages in the form in which this template takes them.

        ``tools`` and ``arguments``: its tools and its variables. Raises: TokenizerError when a message is none, or when the
        template refuses the conversation.
        """
        plain: list[dict[str, Any]] = for_template(messages)
        for form in self._forms:
            plain = form(plain)
        return self.exactly(plain, tools, arguments, add_generation_prompt=add_generation_prompt)

    def exactly(
        self,
        messages: Messages,
        tools: Tools = (),
        arguments: Arguments = NO_ARGUMENTS,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Render messages as they are, as ``apply_chat_template`` of transformers does. Raises: TokenizerError."""
        name = WITH_TOOLS if tools and WITH_TOOLS in self._compiled else DEFAULT
        day = pinned_day(arguments)
        values: dict[str, Any] = {} if day is None else {"strftime_now": day.strftime}
        values |= {**self._specials, **arguments}
        # As transformers has it: a template asks whether tools are none, not only whether they are defined.
        values |= {"messages": list(messages), "tools": list(tools) or None, "documents": None}
        try:
            return str(self._compiled[name].render(add_generation_prompt=add_generation_prompt, **values))
        # The template is a program of the model's author: it refuses with raise_exception, and may fail in any way.
        except Exception as error:
            raise TokenizerError(
                f"{self._texts[name].path}: the chat template refuses the conversation: {type(error).__name__}: {error}: "
                "send messages that it takes, or use another template"
            ) from error

    def reads_clock(self, arguments: Arguments = NO_ARGUMENTS) -> bool:
        """Return whether prompts say which day it is: they differ from one day to the next unless ``arguments`` pin it."""
        if pinned_day(arguments) is not None or "strftime_now" not in self.sources:
            return False
        asked: list[str] = []

        def note(pattern: str) -> str:
            asked.append(pattern)
            return pattern

        conversations: list[Messages] = [[{"role": "user", "content": "."}]]
        conversations.append([{"role": "system", "content": "."}, *conversations[0]])
        for messages in conversations:
            for tools in ((), _TOOLS):
                with suppress(TokenizerError):
                    self.exactly(messages, tools, {**arguments, "strftime_now": note})
        return bool(asked)

    @cached_property
    def _forms(self) -> list[Form]:
        """What is done to messages because this template takes them otherwise than most templates."""
        forms: list[Form] = []
        if not self._shows(_MARK, []) and self._shows(_MARK, [with_parts]):
            forms.append(with_parts)
        if not self._writes_objects(forms) and self._writes_objects([*forms, with_text_arguments]):
            forms.append(with_text_arguments)
        return forms

    def _shows(self, text: str, forms: Sequence[Form]) -> bool:
        """Whether a user's text is in the prompt."""
        return text in self._tried([{"role": "user", "content": text}], forms)

    def _writes_objects(self, forms: Sequence[Form]) -> bool:
        """Whether the arguments of a call are written as JSON; also where calls are not written at all.

        Some templates fail on objects (DeepSeek), others write them in Python's notation.
        """
        function = {"name": "f", "arguments": {_MARK: True}}
        calls = [{"id": "call_0", "type": "function", "function": function}]
        called = {"role": "assistant", "content": "", "tool_calls": calls}
        written = self._tried(
            [{"role": "user", "content": "."}, called], forms, _TOOLS if WITH_TOOLS in self._compiled else ()
        )
        return bool(written) and repr({_MARK: True}) not in written

    def _tried(self, messages: Messages, forms: Sequence[Form], tools: Tools = ()) -> str:
        """Return what the template makes of messages in these forms; empty where it refuses them."""
        plain = list(messages)
        try:
            for form in forms:
                plain = list(form(plain))
            return self.exactly(plain, tools, add_generation_prompt=False)
        except TokenizerError:
            return ""
