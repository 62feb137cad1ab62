"""Answers as chat completions."""

from collections.abc import Iterator
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from gspo_services.rollout.endpoint.asked import Rest, event
from gspo_services.rollout.endpoint.calls import CallAnswer, CallDelta, CallRefused, ToolCall
from gspo_services.rollout.endpoint.pages import openai_error

LOGPROBS_IN_A_CHUNK: Final = 256
"""A stream gives log-probs when the answer is complete; in pieces, so that none is much larger than a piece of text."""
_BROKEN_CHARACTER: Final = "\ufffd"


class _Function(msgspec.Struct):
    name: str
    arguments: str


class _Call(msgspec.Struct):
    id: str
    function: _Function
    type: Literal["function"] = "function"
    index: int | UnsetType = UNSET


class _Message(msgspec.Struct):
    """A message of an answer, or of a chunk, which holds only its additions."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType | None = UNSET
    tool_calls: list[_Call] | UnsetType = UNSET


class _Logprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[Any] = []


class _Logprobs(msgspec.Struct):
    content: list[_Logprob]


class _Choice(msgspec.Struct):
    message: _Message | UnsetType = UNSET
    delta: _Message | UnsetType = UNSET
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    index: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class _Completion(msgspec.Struct):
    id: str
    created: int
    model: str
    object: Literal["chat.completion", "chat.completion.chunk"]
    choices: list[_Choice]
    usage: _Usage | UnsetType | None = UNSET


class ChatWriter:
    """Writes one answer as a chat completion, or as its chunks: text as it arrives, the rest when the answer is complete."""

    def __init__(self, model: str, *, include_usage: bool, logprobs: bool) -> None:
        self._model = model
        # A client that asked for the usage finds the field in every chunk, as OpenAI has it.
        self._usage: UnsetType | None = None if include_usage else UNSET
        self._logprobs = logprobs
        self._begun = False
        self._rest = Rest()

    def whole(self, answer: CallAnswer) -> bytes:
        """See ``Writer.whole``."""
        message = _Message(role="assistant", content=answer.content)
        if answer.reasoning is not None:
            message.reasoning_content = answer.reasoning
        if answer.tool_calls:
            message.tool_calls = [_call(call) for call in answer.tool_calls]
        given = _Logprobs(_logprobs(answer, 0, len(answer.tokens))) if self._logprobs else None
        choice = _Choice(message=message, logprobs=given, finish_reason=answer.finish_reason)
        return msgspec.json.encode(
            _Completion(answer.id, answer.created, self._model, "chat.completion", [choice], usage=_usage(answer))
        )

    def text(self, delta: CallDelta) -> Iterator[bytes]:
        """See ``Writer.text``."""
        yield from self._beginning(delta)
        self._rest.given(delta)
        yield from self._text(delta, delta.content, delta.reasoning)

    def end(self, answer: CallAnswer) -> Iterator[bytes]:
        """See ``Writer.end``."""
        yield from self._beginning(answer)
        reasoning, content = self._rest.of(answer)
        yield from self._text(answer, content, reasoning)
        for index, call in enumerate(answer.tool_calls):
            yield self._chunk(answer, _Choice(delta=_Message(tool_calls=[_call(call, index)])))
        if self._logprobs:
            for begin in range(0, len(answer.tokens), LOGPROBS_IN_A_CHUNK):
                some = _Logprobs(_logprobs(answer, begin, begin + LOGPROBS_IN_A_CHUNK))
                yield self._chunk(answer, _Choice(delta=_Message(), logprobs=some))
        yield self._chunk(answer, _Choice(delta=_Message(), finish_reason=answer.finish_reason))
        if self._usage is None:
            yield self._event(answer, [], _usage(answer))
        yield event(b"[DONE]")

    def failed(self, refused: CallRefused) -> bytes:
        """See ``Writer.failed``; no [DONE] follows."""
        return event(openai_error(refused))

    def _beginning(self, piece: CallDelta | CallAnswer) -> Iterator[bytes]:
        if not self._begun:
            self._begun = True
            yield self._chunk(piece, _Choice(delta=_Message(role="assistant", content="")))

    def _text(self, piece: CallDelta | CallAnswer, content: str, reasoning: str) -> Iterator[bytes]:
        # Reasoning comes before the content, even if both arrive at once.
        if reasoning:
            yield self._chunk(piece, _Choice(delta=_Message(reasoning_content=reasoning)))
        if content:
            yield self._chunk(piece, _Choice(delta=_Message(content=content)))

    def _chunk(self, piece: CallDelta | CallAnswer, choice: _Choice) -> bytes:
        return self._event(piece, [choice], self._usage)

    def _event(self, piece: CallDelta | CallAnswer, choices: list[_Choice], usage: _Usage | UnsetType | None) -> bytes:
        chunk = _Completion(piece.id, piece.created, self._model, "chat.completion.chunk", choices, usage)
        return event(msgspec.json.encode(chunk))


def _call(call: ToolCall, index: int | UnsetType = UNSET) -> _Call:
    return _Call(id=call.id, function=_Function(call.name, call.arguments), index=index)


def _usage(answer: CallAnswer) -> _Usage:
    sampled = len(answer.token_ids)
    return _Usage(answer.prompt_tokens, sampled, answer.prompt_tokens + sampled)


def _logprobs(answer: CallAnswer, begin: int, end: int) -> list[_Logprob]:
    pairs = zip(answer.tokens[begin:end], answer.logprobs[begin:end], strict=True)
    return [_Logprob(token, logprob, _bytes(token)) for token, logprob in pairs]


def _bytes(token: str) -> list[int] | None:
    """Return the bytes; None for a part of a character, whose bytes the text does not show."""
    return None if _BROKEN_CHARACTER in token else list(token.encode())
