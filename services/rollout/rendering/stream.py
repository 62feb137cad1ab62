"""Streams an answer while it is sampled: text as soon as it is final, and the token at which a stop string ends it."""

from collections.abc import Sequence
from typing import Literal

from gspo_services.rollout.rendering.answer_text import AnswerText
from gspo_services.rollout.rendering.decoder import TextDecoder
from gspo_services.rollout.rendering.interface import AnswerPiece, Parsed
from gspo_services.rollout.rendering.stops import StopStrings, num_held


class AnswerStream:
    """One answer. Feed it the sampled ids as they come, and at the end the result of ``Renderer.parse``.

    Held back are: text that may be the beginning of a marker or of a stop string, whitespace at an end (parsers strip it),
    and everything after the beginning of a tool call, which only the whole answer can confirm.
    """

    def __init__(self, answer: AnswerText, stops: Sequence[str] = (), prompt_ids: Sequence[int] = ()) -> None:
        """``prompt_ids`` tells whether the prompt has opened the reasoning. Raises: RenderingError for a stop string."""
        self._markers = answer.markers
        self._decoder = TextDecoder(answer)
        self._stops = StopStrings(stops)
        self._part: Literal["start", "reasoning", "content", "held"]
        self._part = "reasoning" if answer.begins_in_reasoning(prompt_ids) else "start"
        self._pending = ""
        self._num_fed = 0
        self._num_decoded = 0
        self._said = AnswerPiece()
        self.stopped_at: int | None = None
        """How many of the sampled ids are the answer, once a stop string is complete: end the request, drop later ids."""

    def feed(self, token_ids: Sequence[int]) -> AnswerPiece:
        """Add ids; returns the text that is now final."""
        before = self._said
        for token_id in token_ids:
            if self.stopped_at is not None:
                break
            self._num_fed += 1
            self._add(self._decoder.feed(token_id))
        self._advance()
        return self._since(before)

    def finish(self, parsed: Parsed) -> AnswerPiece:
        """Return the rest of ``parsed``, which is final: text already sent that is not in it cannot be revoked."""
        said = self._said
        reasoning = parsed.reasoning or ""
        return AnswerPiece(
            reasoning=reasoning[len(said.reasoning) :] if reasoning.startswith(said.reasoning) else "",
            content=parsed.content[len(said.content) :] if parsed.content.startswith(said.content) else "",
        )

    def _add(self, text: str) -> None:
        at = self._stops.feed(text) if text else None
        if at is not None:
            self.stopped_at = self._num_fed
            # Where the stop string began before this text, its beginning is still held back.
            keep = at - self._num_decoded
            self._pending = self._pending + text[:keep] if keep >= 0 else self._pending[:keep]
        else:
            self._pending += text
        self._num_decoded += len(text)

    def _advance(self) -> None:
        moved = True
        while moved:
            moved = {"start": self._start, "reasoning": self._reasoning, "content": self._content, "held": _stay}[
                self._part
            ]()

    def _start(self) -> bool:
        self._pending = self._pending.lstrip()
        opens = self._markers.reasoning_opens
        if opens and self._pending.startswith(opens):
            self._pending = self._pending.removeprefix(opens)
            self._part = "reasoning"
        elif self._pending and not opens.startswith(self._pending):
            self._part = "held" if self._markers.call_is_answer and self._pending.startswith("{") else "content"
        else:
            return False
        return True

    def _reasoning(self) -> bool:
        opens, closes = self._markers.reasoning_opens, self._markers.reasoning_closes
        inside, closed, rest = self._pending.partition(closes)
        # Once more inside it opens nothing.
        inside = inside.replace(opens, "")
        calls = [at for marker in self._markers.calls_open if (at := inside.find(marker)) >= 0]
        if calls:
            # Some formats let a call end the reasoning, unless the reasoning is closed later.
            self._pending = inside[: min(calls)]
            self._say("reasoning", whole=True)
            self._part = "held"
            return False
        if closed:
            self._pending = inside
            self._say("reasoning", whole=True)
            self._pending, self._part = rest, "content"
            return True
        self._pending = inside
        self._say("reasoning", whole=False)
        return False

    def _content(self) -> bool:
        calls = [at for marker in self._markers.calls_open if (at := self._pending.find(marker)) >= 0]
        if self._markers.call_is_answer and not self._said.content and self._pending.lstrip().startswith("{"):
            self._part = "held"
            return False
        if calls:
            self._pending = self._pending[: min(calls)]
            self._part = "held"
        self._say("content", whole=bool(calls))
        return False

    def _say(self, part: Literal["reasoning", "content"], *, whole: bool) -> None:
        said = self._said.reasoning if part == "reasoning" else self._said.content
        text = self._pending if said else self._pending.lstrip()
        markers = (
            self._markers.reasoning_opens,
            self._markers.reasoning_closes,
            *self._markers.calls_open,
            *self._stops.strings,
        )
        # After the stop string nothing more can begin.
        held = 0 if whole or self.stopped_at is not None else num_held(text, [marker for marker in markers if marker])
        certain = text[: len(text) - held].rstrip()
        self._pending = text[len(certain) :]
        if part == "reasoning":
            self._said = AnswerPiece(reasoning=said + certain, content=self._said.content)
        else:
            self._said = AnswerPiece(reasoning=self._said.reasoning, content=said + certain)

    def _since(self, before: AnswerPiece) -> AnswerPiece:
        return AnswerPiece(self._said.reasoning[len(before.reasoning) :], self._said.content[len(before.content) :])


def _stay() -> bool:
    return False
