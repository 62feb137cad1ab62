"""Server-sent events, the part of the format that SGLang uses: `data: <payload>` events ended by an empty line."""

from typing import Final

MAX_EVENT_BYTES: Final = 16 * 1024 * 1024
"""An event of 100,000 tokens with log-probs is some 4 MB; more than this is not a stream of ours."""


class EventParser:
    """Bytes in, in whatever pieces the network gives, payloads of whole events out. No input or output."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._rest = bytearray()
        self._carriage_return = False

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes; return the payloads of the events that are complete now, several `data` lines joined by newlines.

        Comments and other fields are skipped, as the format asks.
        Raises: ValueError when an event is longer than the limit; the stream cannot be read on then.
        """
        if self._carriage_return:
            data = b"\r" + data
        # The network may cut a CR LF in two.
        self._carriage_return = data.endswith(b"\r")
        data = data.removesuffix(b"\r").replace(b"\r\n", b"\n")
        # What was searched before is not searched again: large events come in many parts.
        searched = max(0, len(self._rest) - 1)
        self._rest += data
        payloads: list[bytes] = []
        begin = 0
        while (end := self._rest.find(b"\n\n", max(begin, searched))) >= 0:
            self._check(end - begin)
            payload = _payload(bytes(self._rest[begin:end]))
            if payload is not None:
                payloads.append(payload)
            begin = end + 2
        del self._rest[:begin]
        # A newline at the end may be the first half of the event's end.
        self._check(len(self._rest) - self._rest.endswith(b"\n"))
        return payloads

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_event_bytes:
            raise ValueError(f"an event of {num_bytes} bytes or more, the limit is {self._max_event_bytes}")

    @property
    def num_pending_bytes(self) -> int:
        """Bytes of an event that is not complete; at the end of a stream they mean that it was cut off."""
        return len(self._rest.strip(b"\n"))


def _payload(event: bytes) -> bytes | None:
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
