"""Renders any model by its own chat template."""

import contextlib
from collections.abc import Sequence
from typing import Any, Final

from gspo_services.rollout.rendering.answers import AnswerText
from gspo_services.rollout.rendering.interface import (
    NO_ARGUMENTS,
    Arguments,
    Markers,
    Messages,
    Parsed,
    RenderingError,
    Tools,
)
from gspo_services.rollout.rendering.messages import check_arguments, check_tools, for_template, with_text_arguments
from gspo_services.rollout.rendering.stream import AnswerStream
from gspo_services.rollout.rendering.tool_calls import OPEN, find_calls, format_of
from gspo_services.rollout.tokenizer import SENTINEL, ChatTokenizer, TokenizerError

THINK: Final = ("<think>", "</think>")


class TemplateRenderer:
    """Prompts by the template, bridges by a sentinel in the template's text, answers by the markers that it shows."""

    name = "template"

    def __init__(self, tokenizer: ChatTokenizer, template_arguments: Arguments = NO_ARGUMENTS) -> None:
        """``template_arguments`` hold wherever a call gives no others. Raises: RenderingError."""
        check_arguments(template_arguments)
        self._tokenizer = tokenizer
        self._arguments = dict(template_arguments)
        self._format = format_of(tokenizer.template_source)
        thinks = all(marker in tokenizer.template_source for marker in THINK)
        self.stop_ids = tokenizer.stop_ids
        self.markers = Markers(
            reasoning_opens=THINK[0] if thinks else "",
            reasoning_closes=THINK[1] if thinks else "",
            calls_open=(OPEN,) if self._format == "tags" else (),
            call_is_answer=self._format == "json",
        )
        self._answer = AnswerText(tokenizer, self.markers, self.stop_ids)
        self._arguments_as_text = False
        self._arguments_as_text = self._takes_only_text()

    def prompt_ids(self, messages: Messages, tools: Tools = (), arguments: Arguments = NO_ARGUMENTS) -> list[int]:
        """See ``Renderer.prompt_ids``."""
        return self._tokenizer.encode(self.prompt_text(messages, tools, arguments))

    def prompt_text(self, messages: Messages, tools: Tools = (), arguments: Arguments = NO_ARGUMENTS) -> str:
        """Return the text whose ids ``prompt_ids`` gives. Raises: RenderingError."""
        return self._render(for_template(messages), tools, arguments)

    def bridge(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        messages: Messages,
        tools: Tools = (),
        arguments: Arguments = NO_ARGUMENTS,
    ) -> list[int] | None:
        """See ``Renderer.bridge``. Raises: RenderingError for invalid messages."""
        new = for_template(messages)
        if (
            not new
            or any(message["role"] == "assistant" for message in new)
            or self._reasoning_is_open(prompt_ids, sampled_ids)
        ):
            return None
        tail = self._tail(new, tools, arguments)
        if tail is None:
            return None
        if not sampled_ids or sampled_ids[-1] not in self.stop_ids:
            return tail
        # Where the model ended its turn with another stop token than the format has there, no prompt looks like this.
        return tail[1:] if sampled_ids[-1] == tail[0] else None

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
        if self._format == "json" and not tools:
            # An answer that happens to be JSON.
            return Parsed(content=text.strip(), reasoning=reasoning)
        content, calls, problem = find_calls(text, self._format)
        return Parsed(content=content.strip(), reasoning=reasoning, tool_calls=calls, problem=problem)

    def stream(self, stops: Sequence[str] = (), prompt_ids: Sequence[int] = ()) -> AnswerStream:
        """See ``Renderer.stream``."""
        return AnswerStream(self._answer, stops, prompt_ids)

    def text(self, sampled_ids: Sequence[int]) -> str:
        """See ``Renderer.text``."""
        return self._answer.text(sampled_ids)

    def _render(self, messages: Sequence[dict[str, Any]], tools: Tools, arguments: Arguments) -> str:
        check_arguments(arguments)
        check_tools(tools)
        try:
            if self._arguments_as_text:
                messages = with_text_arguments(messages)
            return self._tokenizer.render(messages, tools=tools, arguments={**self._arguments, **arguments})
        except TokenizerError as error:
            raise RenderingError(str(error)) from error

    def _takes_only_text(self) -> bool:
        """Return whether the template writes call arguments verbatim (DeepSeek), and fails on objects."""
        call = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
        conversation: list[dict[str, Any]] = [
            {"role": "user", "content": "."},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        try:
            self._render(conversation, (), NO_ARGUMENTS)
        except RenderingError:
            try:
                self._render(with_text_arguments(conversation), (), NO_ARGUMENTS)
            except RenderingError:
                return False
            return True
        return False

    def _tail(self, new: list[dict[str, Any]], tools: Tools, arguments: Arguments) -> list[int] | None:
        """What the template writes from the stop token of an assistant's turn on; None when it writes no stop token."""
        user = {"role": "user", "content": "."}
        said: dict[str, Any] = {"role": "assistant", "content": SENTINEL}
        # A template may close a turn with tool calls in another way, and results of tools only follow such a turn.
        function = {"name": SENTINEL, "arguments": {}}
        called = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        if new[0]["role"] == "tool":
            called["tool_calls"][0]["id"] = new[0].get("tool_call_id", "call_0")  # type: ignore[index]
            turns = [called, said]
        else:
            turns = [said]
        for turn in turns:
            # A template that knows no tool calls refuses or ignores them; then its ordinary turn counts.
            with contextlib.suppress(RenderingError):
                text = self._render([user, turn, *new], tools, arguments)
                _, found, tail = text.partition(SENTINEL)
                # Twice means that a message has it as well: somebody tries to move the seam.
                if found and SENTINEL not in tail:
                    return self._from_stop(self._tokenizer.encode(tail), said=turn is said)
        return None

    def _from_stop(self, ids: list[int], *, said: bool) -> list[int] | None:
        stop = next((index for index, token in enumerate(ids) if token in self.stop_ids), None)
        # Text between an ordinary answer and the stop token means that this is the stop token of a later message.
        if stop is None or (said and self._tokenizer.decode(ids[:stop]).strip()):
            return None
        return ids[stop:]

    def _reasoning_is_open(self, prompt_ids: Sequence[int], sampled_ids: Sequence[int]) -> bool:
        """The turn ended before its reasoning did: the template cannot say so, so it has no text for it."""
        opens, closes = self.markers.reasoning_opens, self.markers.reasoning_closes
        if not opens:
            return False
        text = self.text(sampled_ids)
        return closes not in text and (self._answer.begins_in_reasoning(prompt_ids) or text.lstrip().startswith(opens))
