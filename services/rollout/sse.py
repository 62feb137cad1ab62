"""Server-sent events, the part of the format that SGLang uses: `data: <payload>` events ended by an empty line."""

from typing import Final

MAX_EVENT_BYTES: Final = 16 * 1024 * 1024
"""An event of 100,000 tokens with log-probs is some 4 MB; more than this is not a stream of ours."""


class EventParser:
    """Bytes in, in whatever pieces the network gives, payloads of whole events out. No input or output."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes; return the payloads of the events that are complete now, several `data` lines joined by newlines.

        Comments and other fields are skipped, as the format asks.
        Raises: ValueError when an event is longer than the limit; the stream cannot be read on then.
        """
        self._rest += data.replace(b"\r\n", b"\n") if b"\r" in data else data
        payloads: list[bytes] = []
        # A CR LF pair may have been cut in two by the network.
        if b"\r" in self._rest:
            cut = len(self._rest) - (1 if self._rest.endswith(b"\r") else 0)
            self._rest[:cut] = self._rest[:cut].replace(b"\r\n", b"\n")
        *events, rest = self._rest.split(b"\n\n")
        for event in events:
            self._check(len(event))
            payload = _payload(bytes(event))
            if payload is not None:
                payloads.append(payload)
        self._rest = rest
        self._check(len(rest))
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
