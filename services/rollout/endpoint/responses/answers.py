"""Answers as OpenAI's responses, whole and as events."""

from collections.abc import Iterator
from typing import Any

import msgspec

from gspo_services.rollout.endpoint.asked import Rest, event
from gspo_services.rollout.endpoint.calls import CallAnswer, CallDelta, CallRefused
from gspo_services.rollout.endpoint.pages import openai_reason
from gspo_services.rollout.endpoint.responses.kept import KeptResponses
from gspo_services.rollout.endpoint.texts import assistant, tool_call

Plain = dict[str, Any]


class Echo(msgspec.Struct, frozen=True, kw_only=True):
    """What a response repeats of its request."""

    model: str
    instructions: str | None
    max_output_tokens: int | None
    previous_response_id: str | None
    temperature: float
    top_p: float
    store: bool
    tools: list[Any]


class ResponseWriter:
    """Writes one answer as a response. Its conversation is kept before the agent has its id."""

    def __init__(self, echo: Echo, messages: list[Plain], kept: KeptResponses | None, *, logprobs: bool) -> None:
        """``messages``: of the request. ``kept``: gets the conversation, None where the agent does not want it stored."""
        self._echo = echo
        self._messages = messages[1:] if echo.instructions else messages
        self._kept = kept
        self._logprobs = logprobs
        self._rest = Rest()
        self._events = _Events()
        self._begun = False

    def whole(self, answer: CallAnswer) -> bytes:
        """See ``Writer.whole``."""
        self._keep(answer)
        return msgspec.json.encode(self._response(answer, self._items(answer)))

    def text(self, delta: CallDelta) -> Iterator[bytes]:
        """See ``Writer.text``."""
        yield from self._beginning(delta)
        self._rest.given(delta)
        yield from self._piece(delta, delta.reasoning, delta.content)

    def end(self, answer: CallAnswer) -> Iterator[bytes]:
        """See ``Writer.end``."""
        self._keep(answer)
        yield from self._beginning(answer)
        reasoning, content = self._rest.of(answer)
        yield from self._piece(answer, reasoning, content)
        items = self._items(answer)
        for place, item in enumerate(items):
            if place >= self._events.num_items:
                yield from self._events.opened(place, {**item, **_EMPTY[item["type"]], "status": "in_progress"})
            yield from self._events.whole(place, item)
        status = "incomplete" if answer.finish_reason == "length" else "completed"
        yield self._events.event(f"response.{status}", response=self._response(answer, items))

    def failed(self, refused: CallRefused) -> bytes:
        """See ``Writer.failed``."""
        reason = openai_reason(refused)
        return self._events.event("error", **reason | {"type": "error", "error": reason})

    def _beginning(self, piece: CallDelta | CallAnswer) -> Iterator[bytes]:
        if not self._begun:
            self._begun = True
            for name in ("created", "in_progress"):
                yield self._events.event(f"response.{name}", response=self._response(piece, None))

    def _piece(self, piece: CallDelta | CallAnswer, reasoning: str, content: str) -> Iterator[bytes]:
        for kind, text in (("reasoning", reasoning), ("message", content)):
            if text:
                if self._events.open_kind != kind:
                    # What was open is complete: reasoning comes before the content. Its end is told with the whole answer.
                    item = _item(kind, piece.id, "in_progress", **_EMPTY[kind])
                    yield from self._events.opened(self._events.num_items, item)
                yield self._events.delta(text)

    def _items(self, answer: CallAnswer) -> list[Plain]:
        """Return the answer's output: reasoning, text and calls, each where there is any; a text also where all is empty."""
        cut = "incomplete" if answer.finish_reason == "length" else "completed"
        items = []
        if answer.reasoning:
            items.append(_item("reasoning", answer.id, cut, summary=[], content=[_part("reasoning_text", answer.reasoning)]))
        if answer.content or not (answer.reasoning or answer.tool_calls):
            part = _part("output_text", answer.content or "", self._logprobs_of(answer))
            items.append(_item("message", answer.id, cut, role="assistant", content=[part]))
        for index, call in enumerate(answer.tool_calls):
            called = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
            items.append(_item("function_call", f"{answer.id}_{index}", "completed", **called))
        return items

    def _logprobs_of(self, answer: CallAnswer) -> list[Plain]:
        if not self._logprobs:
            return []
        pairs = zip(answer.tokens, answer.logprobs, strict=True)
        return [
            {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
            for token, logprob in pairs
        ]

    def _keep(self, answer: CallAnswer) -> None:
        if self._kept is not None:
            calls = [tool_call(call.id, call.name, call.arguments) for call in answer.tool_calls]
            self._kept.keep(_name("resp", answer.id), [*self._messages, assistant(answer.content, calls, answer.reasoning)])

    def _response(self, piece: CallDelta | CallAnswer, output: list[Plain] | None) -> Plain:
        answer = piece if isinstance(piece, CallAnswer) and output is not None else None
        is_cut = answer is not None and answer.finish_reason == "length"
        return {
            "id": _name("resp", piece.id),
            "object": "response",
            "created_at": piece.created,
            "status": "in_progress" if answer is None else "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "error": None,
            **msgspec.to_builtins(self._echo),
            "output": output or [],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "text": {"format": {"type": "text"}},
            "reasoning": {"effort": None, "summary": None},
            "truncation": "disabled",
            "background": False,
            "metadata": {},
            "usage": None if answer is None else _usage(answer),
        }


class _Events:
    """Numbers the events of one stream, and knows which item of the output is open."""

    def __init__(self) -> None:
        self._num_events = 0
        self.num_items = 0
        self.open_kind = ""
        self._open: Plain = {}

    def event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return event(msgspec.json.encode(data), kind)

    def opened(self, place: int, item: Plain) -> Iterator[bytes]:
        """Begin an item of the output, and the part in it that grows."""
        self.num_items, self.open_kind = place + 1, item["type"]
        self._open = {"item_id": item["id"], "output_index": place}
        yield self.event("response.output_item.added", output_index=place, item=item)
        if self.open_kind in _TEXTS:
            self._open["content_index"] = 0
            part = _part(_TEXTS[self.open_kind], "")
            yield self.event("response.content_part.added", **self._open, part=part)

    def delta(self, text: str) -> bytes:
        """Return more of the text of the open item."""
        kind = _TEXTS[self.open_kind]
        more: Plain = {"logprobs": []} if kind == "output_text" else {}
        return self.event(f"response.{kind}.delta", **self._open, delta=text, **more)

    def whole(self, place: int, item: Plain) -> Iterator[bytes]:
        """End an item."""
        at: Plain = {"item_id": item["id"], "output_index": place}
        if item["type"] == "function_call":
            yield self.event("response.function_call_arguments.delta", **at, delta=item["arguments"])
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self.event("response.function_call_arguments.done", **at, **done)
        else:
            kind, part = _TEXTS[item["type"]], item["content"][0]
            at["content_index"] = 0
            more: Plain = {"logprobs": part["logprobs"]} if kind == "output_text" else {}
            yield self.event(f"response.{kind}.done", **at, text=part["text"], **more)
            yield self.event("response.content_part.done", **at, part=part)
        yield self.event("response.output_item.done", output_index=place, item=item)


_TEXTS = {"reasoning": "reasoning_text", "message": "output_text"}
_EMPTY: dict[str, Plain] = {
    "reasoning": {"summary": [], "content": []},
    "message": {"role": "assistant", "content": []},
    "function_call": {"arguments": ""},
}
_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}


def _item(kind: str, call: str, status: str, **fields: Any) -> Plain:
    return {"id": _name(_PREFIXES[kind], call), "type": kind, "status": status, **fields}


def _name(prefix: str, call: str) -> str:
    return f"{prefix}_{call.removeprefix('chatcmpl-')}"


def _part(kind: str, text: str, logprobs: list[Plain] | None = None) -> Plain:
    more: Plain = {"annotations": [], "logprobs": logprobs or []} if kind == "output_text" else {}
    return {"type": kind, "text": text, **more}


def _usage(answer: CallAnswer) -> Plain:
    sampled = len(answer.token_ids)
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + sampled,
    }
