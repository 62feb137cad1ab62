"""Model families whose format the package ``renderers`` knows: uses its parsers, and its ends of unfinished reasoning.

Prompts and bridges come from the model's own chat template, whose ids are right by definition; the package cuts some texts
into other tokens than the template does. A family counts only where both write the same text (``families.py``).
"""

import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from gspo_services.rollout.rendering.answer_text import AnswerText
from gspo_services.rollout.rendering.interface import (
    NO_ARGUMENTS,
    Arguments,
    Markers,
    Messages,
    Parsed,
    ParsedCall,
    RenderingError,
    Tools,
)
from gspo_services.rollout.rendering.messages import plain_messages
from gspo_services.rollout.rendering.stream import AnswerStream
from gspo_services.rollout.rendering.template import TemplateRenderer
from gspo_services.rollout.rendering.tool_calls import (
    CALL_IS_ANSWER,
    find_calls,
    format_of,
    has_repeated_key,
    make_call,
    marks_of,
    openers_of,
)
from gspo_services.rollout.tokenizer import ChatTokenizer

MAX_VARIANTS: Final = 32
"""How many combinations of template arguments keep their renderers; clients may send any number."""


class LibraryTokenizer:
    """A ``ChatTokenizer`` as ``renderers`` wants it. Without offsets on purpose: they cost time and serve attribution."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self.name_or_path = str(tokenizer.directory)
        self.unk_token_id = None
        self.eos_token_id = min(tokenizer.stop_ids)
        self.chat_template = tokenizer.template.source

    def encode(self, text: str, *_: object, **__: object) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, token_ids: Any, *_: object, **__: object) -> str:
        return self._tokenizer.decode([token_ids] if isinstance(token_ids, int) else token_ids)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self._tokenizer.token_id(tokens)
        return [self._tokenizer.token_id(token) for token in tokens]


class Family:
    """One family's renderer, for any template arguments. Raises: RenderingError where the tokenizer lacks its tokens."""

    def __init__(self, tokenizer: ChatTokenizer, name: str, arguments: Arguments = NO_ARGUMENTS) -> None:
        """``arguments`` hold wherever a call gives no others."""
        self._library = importlib.import_module("renderers")
        self._tokenizer = LibraryTokenizer(tokenizer)
        self.name = name
        self._arguments = dict(arguments)
        self._variants: dict[str, Any] = {}
        self.variant(NO_ARGUMENTS)

    def variant(self, arguments: Arguments) -> Any:
        """Return the package's renderer with these template arguments. Raises: RenderingError for those that it does not
        know.
        """
        arguments = {**self._arguments, **arguments}
        key = json.dumps(arguments, sort_keys=True, default=repr)
        if key not in self._variants:
            if len(self._variants) >= MAX_VARIANTS:
                self._variants.clear()
            self._variants[key] = self._make(arguments)
        return self._variants[key]

    def rendered(self, messages: Messages, tools: Tools) -> str | None:
        """Return the text of a prompt; None when the family refuses the conversation."""
        try:
            ids = self.variant(NO_ARGUMENTS).render_ids(messages, tools=list(tools) or None, add_generation_prompt=True)
            return self._tokenizer.decode(ids)
        # The package's renderers fail in any way on what their family does not have.
        except Exception:  # noqa: BLE001
            return None

    def _make(self, arguments: Mapping[str, Any]) -> Any:
        try:
            config = self._library.config_from_name(self.name)
            # Reasoning stays: a bridge must not drop sampled ids.
            kept = type(config).model_validate({"name": self.name, "thinking_retention": "all"})
            try:
                return self._library.create_renderer(self._tokenizer, kept, chat_template_kwargs=arguments)
            except ValueError:
                # The arguments themselves say what stays.
                return self._library.create_renderer(self._tokenizer, config, chat_template_kwargs=arguments)
        # The package asserts, looks things up and validates in many places.
        except Exception as error:
            raise RenderingError(f"renderer {self.name!r}: {type(error).__name__}: {str(error)[:300]}") from error


class LibraryRenderer:
    """Prompts and bridges by the model's template, answers by the family's renderer."""

    def __init__(self, tokenizer: ChatTokenizer, family: Family, *, most_tokens: int | None = None) -> None:
        """Render with the tokenizer's template arguments wherever a call gives no others. ``most_tokens``: see
        ``create_renderer``."""
        self._family = family
        self._arguments = tokenizer.template_arguments
        self._template = TemplateRenderer(tokenizer, most_tokens=most_tokens)
        self.name = family.name
        known = family.variant(NO_ARGUMENTS).get_stop_token_ids()
        self.stop_ids = tokenizer.stop_ids | frozenset(known)
        self.markers = _markers(tokenizer)
        self._answer = AnswerText(tokenizer, self.markers, self.stop_ids)
        self._format = format_of(tokenizer.template.source)

    def prompt_ids(self, messages: Messages, tools: Tools = (), arguments: Arguments = NO_ARGUMENTS) -> list[int]:
        """See ``Renderer.prompt_ids``."""
        return self._template.prompt_ids(messages, tools, arguments)

    def bridge(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        messages: Messages,
        tools: Tools = (),
        arguments: Arguments = NO_ARGUMENTS,
    ) -> list[int] | None:
        """See ``Renderer.bridge``. Raises: RenderingError for invalid messages."""
        bridge = self._template.bridge(prompt_ids, sampled_ids, messages, tools, arguments)
        if bridge is not None or (sampled_ids and sampled_ids[-1] in self.stop_ids):
            return bridge
        # An answer that was cut within its reasoning: the template cannot say it, the family knows how to end it.
        new = plain_messages(messages)
        before = [*prompt_ids, *sampled_ids]
        try:
            renderer = self._family.variant({**self._arguments, **arguments})
            bridged = renderer.bridge_to_next_turn(list(prompt_ids), list(sampled_ids), new, tools=list(tools) or None)
        # Another reason why it cannot be bridged; a new sequence will say whether the conversation can be rendered at all.
        except Exception:  # noqa: BLE001
            return None
        after = None if bridged is None else [int(token) for token in bridged.token_ids]
        return after[len(before) :] if after and after[: len(before)] == before and len(after) > len(before) else None

    def call_opening(self, name: str, tools: Tools, arguments: Arguments = NO_ARGUMENTS) -> list[int] | None:
        """See ``Renderer.call_opening``."""
        return self._template.call_opening(name, tools, arguments)

    def parse(
        self,
        sampled_ids: Sequence[int],
        tools: Tools = (),
        arguments: Arguments = NO_ARGUMENTS,
        prompt_ids: Sequence[int] = (),
    ) -> Parsed:
        """See ``Renderer.parse``."""
        ids = self._answer.ids(sampled_ids)
        try:
            try:
                renderer = self._family.variant({**self._arguments, **arguments})
            except RenderingError:
                renderer = self._family.variant(NO_ARGUMENTS)
            answer = renderer.parse_response(ids, tools=list(tools) or None, prompt_ids=list(prompt_ids) or None)
            return self._parsed(answer, ids, tools)
        # The parsers meet anything that a model samples: an unreadable answer is text.
        except Exception as error:  # noqa: BLE001
            return Parsed(
                content=self.text(sampled_ids).strip(), problem=f"the answer cannot be read: {type(error).__name__}"
            )

    def stream(self, stops: Sequence[str] = (), prompt_ids: Sequence[int] = ()) -> AnswerStream:
        """See ``Renderer.stream``."""
        return AnswerStream(self._answer, stops, prompt_ids)

    def text(self, sampled_ids: Sequence[int]) -> str:
        """See ``Renderer.text``."""
        return self._answer.text(sampled_ids)

    def _parsed(self, answer: Any, ids: list[int], tools: Tools) -> Parsed:
        reasoning = None if answer.reasoning_content is None else answer.reasoning_content.strip()
        if self._format in CALL_IS_ANSWER:
            text = self.text(ids)
            # Without tools it is an answer that happens to be JSON.
            content, calls, problem = find_calls(text, self._format, tools) if tools else (text, [], None)
            return Parsed(content=content.strip(), reasoning=reasoning, tool_calls=calls, problem=problem)
        begin = self._first_call(answer.tool_calls, ids)
        if begin is None:
            outside, calls, problem = self._attempted(answer.tool_calls, ids)
        else:
            # The package takes the first closing tag for the end of a call, and leaves out what it does not look for. So
            # it only says where calls begin.
            outside, calls, problem = find_calls(self.text(ids)[begin:], self._format, tools)
        content = "\n".join(text for text in (answer.content, outside) if text.strip()).strip()
        return Parsed(content=content, reasoning=reasoning, tool_calls=calls, problem=problem)

    def _first_call(self, attempts: Sequence[Any], ids: list[int]) -> int | None:
        """Return where in the text the block of the first call begins; None where the package alone reads the format."""
        begins = [attempt.token_span[0] for attempt in attempts if attempt.token_span]
        opens = next(iter(openers_of(self._format)), "")
        if not begins or not opens:
            return None
        # The package's span may begin within the block.
        place = self.text(ids).rfind(opens, 0, len(self.text(ids[: min(begins)])) + len(opens))
        return None if place < 0 else place

    def _attempted(self, attempts: Sequence[Any], ids: list[int]) -> tuple[str, list[ParsedCall], str | None]:
        """Return the package's calls as ``find_calls`` does."""
        calls: list[ParsedCall] = []
        unread: list[str] = []
        problem = None
        for attempt in attempts:
            try:
                if attempt.status != "ok":
                    raise ValueError(str(attempt.status))
                if has_repeated_key(attempt.raw):
                    raise ValueError("an object has a key twice")
                calls.append(make_call(attempt.name, {} if attempt.arguments is None else attempt.arguments))
            except ValueError as error:
                problem = problem or f"a tool call cannot be read: {error}"
                unread.append(self.text(ids[slice(*attempt.token_span)]) if attempt.token_span else attempt.raw)
        return "\n".join(unread), calls, problem


def _markers(tokenizer: ChatTokenizer) -> Markers:
    """Markers of the supported families that this vocabulary has as tokens."""

    def held(*texts: str) -> tuple[str, ...]:
        return tuple(text for text in texts if tokenizer.token_id(text) is not None)

    thinks = tokenizer.token_id("</think>") is not None
    written = format_of(tokenizer.template.source)
    known = held("<tool_call>", "<｜tool▁calls▁begin｜>", "<|tool_calls_section_begin|>", "<|python_tag|>")
    return Markers(
        reasoning_opens="<think>" if thinks else "",
        reasoning_closes="</think>" if thinks else "",
        call_is_answer=tokenizer.token_id("<|python_tag|>") is not None,
        calls_open=tuple(dict.fromkeys((*openers_of(written), *known))),
        calls_within=("</tool_call>", *marks_of(written)),
    )
