"""Answers and errors in OpenAI's shapes, as JSON."""

from collections.abc import Iterator
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from gspo_services.rollout.endpoint.calls import CallAnswer, CallDelta, CallRefused, ToolCall

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


def completion(answer: CallAnswer, model: str, *, logprobs: bool) -> bytes:
    """Return a complete, unstreamed answer."""
    message = _Message(role="assistant", content=answer.content)
    if answer.reasoning is not None:
        message.reasoning_content = answer.reasoning
    if answer.tool_calls:
        message.tool_calls = [_call(call) for call in answer.tool_calls]
    given = _Logprobs(_logprobs(answer, 0, len(answer.tokens))) if logprobs else None
    choice = _Choice(message=message, logprobs=given, finish_reason=answer.finish_reason)
    return msgspec.json.encode(
        _Completion(answer.id, answer.created, model, "chat.completion", [choice], usage=_usage(answer))
    )


class ChunkWriter:
    """Makes the events of one stream: text as it arrives, and the rest when the answer is complete."""

    def __init__(self, model: str, *, include_usage: bool, logprobs: bool) -> None:
        self._model = model
        # A client that asked for the usage finds the field in every chunk, as OpenAI has it.
        self._usage: UnsetType | None = None if include_usage else UNSET
        self._logprobs = logprobs
        self._begun = False
        self._content: list[str] = []
        self._reasoning: list[str] = []

    def text(self, delta: CallDelta) -> Iterator[bytes]:
        """Events of a piece of text."""
        yield from self._beginning(delta)
        self._content.append(delta.content)
        self._reasoning.append(delta.reasoning)
        yield from self._text(delta, delta.content, delta.reasoning)

    def end(self, answer: CallAnswer) -> Iterator[bytes]:
        """Return the events of everything not yet sent, to the end of the stream.

        Raises: ValueError when the answer does not begin with the pieces.
        """
        yield from self._beginning(answer)
        reasoning = _rest(answer.reasoning, self._reasoning, "reasoning")
        yield from self._text(answer, _rest(answer.content, self._content, "content"), reasoning)
        for index, call in enumerate(answer.tool_calls):
            yield self._chunk(answer, _Choice(delta=_Message(tool_calls=[_call(call, index)])))
        if self._logprobs:
            for begin in range(0, len(answer.tokens), LOGPROBS_IN_A_CHUNK):
                some = _Logprobs(_logprobs(answer, begin, begin + LOGPROBS_IN_A_CHUNK))
                yield self._chunk(answer, _Choice(delta=_Message(), logprobs=some))
        yield self._chunk(answer, _Choice(delta=_Message(), finish_reason=answer.finish_reason))
        if self._usage is None:
            yield self._event(answer, [], _usage(answer))
        yield b"data: [DONE]\n\n"

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
        return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def models_page(model: str) -> bytes:
    """List the only model."""
    return b'{"object":"list","data":[' + model_page(model) + b"]}"


def model_page(model: str) -> bytes:
    """Describe the model. It has no creation time: it is being trained."""
    return msgspec.json.encode({"id": model, "object": "model", "created": 0, "owned_by": "gspo"})


def error_body(refused: CallRefused) -> bytes:
    """Return the body that says why a call was refused."""
    return msgspec.json.encode(
        {
            "error": {
                "message": refused.text,
                "type": "server_error" if refused.status >= 500 else "invalid_request_error",
                "param": refused.param,
                "code": refused.code,
            }
        }
    )


def error_event(refused: CallRefused) -> bytes:
    """Return the last event of a failed stream; no [DONE] follows."""
    return b"data: " + error_body(refused) + b"\n\n"


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


def _rest(whole: str | None, pieces: list[str], name: str) -> str:
    """Return the rest of ``whole`` after the pieces already sent. Raises: ValueError."""
    given = "".join(pieces)
    if not (whole or "").startswith(given):
        raise ValueError(f"the stream gave {name} that the answer does not begin with")
    return (whole or "")[len(given) :]
