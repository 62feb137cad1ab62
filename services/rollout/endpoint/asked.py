"""What an agent asked for, whatever its dialect, and the form in which it is answered."""

from collections.abc import Iterator
from typing import Protocol

import msgspec

from gspo_services.rollout.endpoint.calls import CallAnswer, CallDelta, CallRefused, CallRequest


class Writer(Protocol):
    """Writes one answer in a dialect: whole, or as the events of a stream."""

    def whole(self, answer: CallAnswer) -> bytes:
        """Return the body of an answer that is not streamed."""

    def text(self, delta: CallDelta) -> Iterator[bytes]:
        """Return the events of a piece of text."""

    def end(self, answer: CallAnswer) -> Iterator[bytes]:
        """Return the events of everything not yet sent, to the end of the stream.

        Raises: ValueError when the answer does not begin with the pieces.
        """

    def failed(self, refused: CallRefused) -> bytes:
        """Return the last event of a stream that fails."""


class AgentCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call and the form of its answer."""

    request: CallRequest
    stream: bool
    writer: Writer
    overridden: tuple[str, ...]
    """The fields whose values the run replaced."""
    unknown: tuple[str, ...]
    """Fields that this endpoint does not know and ignores."""


class Rest:
    """The text of an answer that its stream has not given yet."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []

    def given(self, delta: CallDelta) -> None:
        """Note a piece that is given."""
        self._content.append(delta.content)
        self._reasoning.append(delta.reasoning)

    def of(self, answer: CallAnswer) -> tuple[str, str]:
        """Return the rest of the reasoning and of the content. Raises: ValueError when the answer does not begin with the
        pieces.
        """
        return (
            _rest(answer.reasoning, self._reasoning, "reasoning"),
            _rest(answer.content, self._content, "content"),
        )


def _rest(whole: str | None, pieces: list[str], name: str) -> str:
    given = "".join(pieces)
    if not (whole or "").startswith(given):
        raise ValueError(f"the stream gave {name} that the answer does not begin with")
    return (whole or "")[len(given) :]


def event(data: bytes, name: str = "") -> bytes:
    """Return one server-sent event."""
    return (b"event: " + name.encode() + b"\n" if name else b"") + b"data: " + data + b"\n\n"
