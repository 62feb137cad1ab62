"""Renders any model by its own chat template."""

from collections.abc import Sequence
from typing import Any, Final

from gspo_services.rollout.rendering.answer_text import AnswerText
from gspo_services.rollout.rendering.interface import (
    NO_ARGUMENTS,
    Arguments,
    Markers,
    Messages,
    Parsed,
    RenderingError,
    TooLongError,
    Tools,
)
from gspo_services.rollout.rendering.messages import check_arguments, check_tools, plain_messages
from gspo_services.rollout.rendering.stream import AnswerStream
from gspo_services.rollout.rendering.tool_calls import CALL_IS_ANSWER, find_calls, format_of, marks_of, openers_of
from gspo_services.rollout.tokenizer import ChatTokenizer, TokenizerError, TooManyTokens

THINK: Final = ("<think>", "</think>")
ANY_TOOL: Final = "any_tool_of_these"
"""A name that shows where a template writes the name of a tool."""


class TemplateRenderer:
    """Prompts by the template, bridges by a sentinel in the template's text, answers by the markers that it shows."""

    name = "template"

    def __init__(
        self, tokenizer: ChatTokenizer, template_arguments: Arguments | None = None, *, most_tokens: int | None = None
    ) -> None:
        """``template_arguments`` hold wherever a call gives no others; None: those of the tokenizer. ``most_tokens``: see
        ``create_renderer``."""
        self._tokenizer = tokenizer
        self._most_tokens = most_tokens
        self._arguments = tokenizer.template_arguments if template_arguments is None else dict(template_arguments)
        self._format = format_of(tokenizer.template.source)
        thinks = all(marker in tokenizer.template.sources for marker in THINK)
        self.stop_ids = tokenizer.stop_ids
        self.markers = Markers(
            reasoning_opens=THINK[0] if thinks else "",
            reasoning_closes=THINK[1] if thinks else "",
            calls_open=openers_of(self._format),
            calls_within=marks_of(self._format),
            call_is_answer=self._format in CALL_IS_ANSWER,
        )
        self._answer = AnswerText(tokenizer, self.markers, self.stop_ids)

    def prompt_ids(self, messages: Messages, tools: Tools = (), arguments: Arguments = NO_ARGUMENTS) -> list[int]:
        """See ``Renderer.prompt_ids``."""
        return self._encoded(self.prompt_text(messages, tools, arguments))

    def prompt_text(self, messages: Messages, tools: Tools = (), arguments: Arguments = NO_ARGUMENTS) -> str:
        """Return the text whose ids ``prompt_ids`` gives. Raises: RenderingError."""
        check_arguments(arguments)
        check_tools(tools)
        try:
            return self._tokenizer.render(messages, tools=tools, arguments={**self._arguments, **arguments})
        except TokenizerError as error:
            raise RenderingError(str(error)) from error

    def bridge(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        messages: Messages,
        tools: Tools = (),
        arguments: Arguments = NO_ARGUMENTS,
    ) -> list[int] | None:
        """See ``Renderer.bridge``. Raises: RenderingError for invalid messages."""
        check_arguments(arguments)
        check_tools(tools)
        new = plain_messages(messages)
        if (
            not new
            or any(message["role"] == "assistant" for message in new)
            or self._reasoning_is_open(prompt_ids, sampled_ids)
        ):
            return None
        try:
            after = self._tokenizer.continuation(new, tools, {**self._arguments, **arguments}, called_first=True)
            ids = self._encoded(after.text)
            stop = self._tokenizer.stop_of_answer(after, ids)
        except TokenizerError:
            # A new sequence will say whether the conversation can be rendered at all.
            return None
        return None if stop is None else self._joined(ids, stop, sampled_ids, is_answer=not after.is_after_call)

    def call_opening(self, name: str, tools: Tools, arguments: Arguments = NO_ARGUMENTS) -> list[int] | None:
        """See ``Renderer.call_opening``."""
        values = {**self._arguments, **arguments}
        called = {"id": "call_00000", "type": "function", "function": {"name": ANY_TOOL, "arguments": "{}"}}
        said: list[dict[str, Any]] = [{"role": "user", "content": "?"}]
        try:
            prompt = self._tokenizer.render(said, tools=tools, arguments=values)
            said.append({"role": "assistant", "content": None, "tool_calls": [called]})
            whole = self._tokenizer.render(said, tools=tools, arguments=values, add_generation_prompt=False)
        except TokenizerError:
            return None
        opens, closes = self.markers.reasoning_opens, self.markers.reasoning_closes
        if opens and not whole.startswith(prompt):
            # A prompt that closes the reasoning at once: the template need not write that again in an answer.
            head, _, reasoning = prompt.rpartition(opens)
            prompt = head if reasoning.rstrip().endswith(closes) else prompt
        answer = whole.removeprefix(prompt)
        opening = answer.partition(ANY_TOOL)[0]
        if answer == whole or (opens and (opens in opening or prompt.rstrip().endswith(opens))):
            # A model that reasons would have to call before it has thought.
            return None
        if [call.name for call in self.parse(self._encoded(answer), tools).tool_calls] != [ANY_TOOL]:
            return None
        return self._encoded(opening + name)

    def _encoded(self, text: str) -> list[int]:
        if self._most_tokens is not None:
            try:
                self._tokenizer.require_fewer(text, self._most_tokens)
            except TooManyTokens as error:
                raise TooLongError(str(error)) from error
        return self._tokenizer.encode(text)

    def _joined(self, ids: list[int], stop: int, sampled_ids: Sequence[int], *, is_answer: bool) -> list[int] | None:
        """Return what of ``ids`` follows the sampled ones; ``stop``: where among ``ids`` the answer's stop token is.

        None where the model ended its turn otherwise than the format does: no prompt looks like this.
        """
        # Some formats have other tokens before the stop token (Cohere), which the model samples as well.
        begin = 0 if is_answer and self._tokenizer.decode(ids[:stop]).strip() else stop
        if not sampled_ids or sampled_ids[-1] not in self.stop_ids:
            return ids[begin:]
        closing = ids[begin : stop + 1]
        return ids[stop + 1 :] if list(sampled_ids[-len(closing) :]) == closing else None

    def parse(
        self,
        sampled_ids: Sequence[int],
        tools: Tools = (),
        arguments: Arguments = NO_ARGUMENTS,
        prompt_ids: Sequence[int] = (),
    ) -> Parsed:
        """See ``Renderer.parse``."""
        text = self.text(sampled_ids)
        reasoning = None
        opens, closes = self.markers.reasoning_opens, self.markers.reasoning_closes
        opened = self._answer.begins_in_reasoning(prompt_ids)
        if opens and (opened or text.lstrip().startswith(opens)):
            inside, closed, text = text.partition(closes)
            reasoning = inside.replace(opens, "").strip()
            if not closed:
                return Parsed(reasoning=reasoning)
        if self.markers.call_is_answer and not tools:
            # An answer that happens to be JSON.
            return Parsed(content=text.strip(), reasoning=reasoning)
        content, calls, problem = find_calls(text, self._format, tools)
        return Parsed(content=content.strip(), reasoning=reasoning, tool_calls=calls, problem=problem)

    def stream(self, stops: Sequence[str] = (), prompt_ids: Sequence[int] = ()) -> AnswerStream:
        """See ``Renderer.stream``."""
        return AnswerStream(self._answer, stops, prompt_ids)

    def text(self, sampled_ids: Sequence[int]) -> str:
        """See ``Renderer.text``."""
        return self._answer.text(sampled_ids)

    def _reasoning_is_open(self, prompt_ids: Sequence[int], sampled_ids: Sequence[int]) -> bool:
        """The turn ended before its reasoning did: the template cannot say so, so it has no text for it."""
        opens, closes = self.markers.reasoning_opens, self.markers.reasoning_closes
        if not opens:
            return False
        text = self.text(sampled_ids)
        return closes not in text and (self._answer.begins_in_reasoning(prompt_ids) or text.lstrip().startswith(opens))
