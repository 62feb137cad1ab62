"""Answers as Anthropic's messages, whole and as events."""

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from gspo_services.rollout.endpoint.asked import Rest, event
from gspo_services.rollout.endpoint.calls import CallAnswer, CallDelta, CallRefused, FinishReason
from gspo_services.rollout.endpoint.pages import anthropic_error

_REASONS: Final[dict[FinishReason, str]] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageWriter:
    """Writes one answer as a message: blocks of thinking, text and calls of tools."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._rest = Rest()
        self._begun = False
        self._open = ""
        self._num_blocks = 0

    def whole(self, answer: CallAnswer) -> bytes:
        """See ``Writer.whole``."""
        message = self._message(answer, _blocks(answer), _REASONS[answer.finish_reason])
        return msgspec.json.encode({**message, "usage": _usage(answer.prompt_tokens, len(answer.token_ids))})

    def text(self, delta: CallDelta) -> Iterator[bytes]:
        """See ``Writer.text``."""
        yield from self._beginning(delta)
        self._rest.given(delta)
        yield from self._pieces(delta.reasoning, delta.content)

    def end(self, answer: CallAnswer) -> Iterator[bytes]:
        """See ``Writer.end``."""
        yield from self._beginning(answer)
        yield from self._pieces(*self._rest.of(answer))
        yield from self._closed()
        for block in _blocks(answer):
            if block["type"] == "tool_use":
                arguments = msgspec.json.encode(block["input"]).decode()
                yield self._opened({**block, "input": {}})
                yield self._delta("input_json_delta", "partial_json", arguments)
                yield from self._closed()
        delta = {"stop_reason": _REASONS[answer.finish_reason], "stop_sequence": None}
        usage = _usage(answer.prompt_tokens, len(answer.token_ids))
        yield _event("message_delta", delta=delta, usage=usage)
        yield _event("message_stop")

    def failed(self, refused: CallRefused) -> bytes:
        """See ``Writer.failed``."""
        return event(anthropic_error(refused), "error")

    def _beginning(self, piece: CallDelta | CallAnswer) -> Iterator[bytes]:
        if not self._begun:
            self._begun = True
            prompt_tokens = piece.prompt_tokens if isinstance(piece, CallAnswer) else 0
            yield _event("message_start", message={**self._message(piece, [], None), "usage": _usage(prompt_tokens, 0)})

    def _pieces(self, reasoning: str, content: str) -> Iterator[bytes]:
        if reasoning:
            if self._open != "thinking":
                yield self._opened({"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta("thinking_delta", "thinking", reasoning)
        if content:
            if self._open != "text":
                yield from self._closed()
                yield self._opened({"type": "text", "text": ""})
            yield self._delta("text_delta", "text", content)

    def _opened(self, block: dict[str, Any]) -> bytes:
        self._open = block["type"]
        return _event("content_block_start", index=self._num_blocks, content_block=block)

    def _delta(self, kind: str, name: str, text: str) -> bytes:
        return _event("content_block_delta", index=self._num_blocks, delta={"type": kind, name: text})

    def _closed(self) -> Iterator[bytes]:
        if self._open:
            if self._open == "thinking":
                # Clients keep a block of thinking only when it is signed.
                yield self._delta("signature_delta", "signature", _SIGNATURE)
            yield _event("content_block_stop", index=self._num_blocks)
            self._num_blocks += 1
            self._open = ""

    def _message(self, piece: CallDelta | CallAnswer, content: list[dict[str, Any]], reason: str | None) -> dict[str, Any]:
        return {
            "id": f"msg_{piece.id.removeprefix('chatcmpl-')}", "type": "message", "role": "assistant", "model": self._model,
            "content": content, "stop_reason": reason, "stop_sequence": None,
        }  # fmt: skip


_SIGNATURE: Final = "gspo"


def count_page(num_tokens: int) -> bytes:
    """Return the answer of ``count_tokens``."""
    return msgspec.json.encode({"input_tokens": num_tokens})


def _blocks(answer: CallAnswer) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": _SIGNATURE})
    if answer.content:
        blocks.append({"type": "text", "text": answer.content})
    for call in answer.tool_calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": msgspec.json.decode(call.arguments)})
    return blocks


def _usage(prompt_tokens: int, sampled: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt_tokens, "output_tokens": sampled, "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }  # fmt: skip


def _event(kind: str, **fields: Any) -> bytes:
    return event(msgspec.json.encode({"type": kind, **fields}), kind)
