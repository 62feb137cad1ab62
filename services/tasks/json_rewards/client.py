"""POSTs JSON to services of users, which are checked like any peer."""

from __future__ import annotations

from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final, Literal

import aiohttp

from gspo_services.shared.runtime.http_content import UNCOMPRESSED
from gspo_services.shared.runtime.plain_text import without_passwords
from gspo_services.tasks.json_rewards.reading import MAX_ANSWER_BYTES

_CONNECT_S: Final = 10.0
_SHOWN_CHARS: Final = 500
_LONGEST_WAIT_S: Final = 86_400.0

UnansweredReason = Literal["unreachable", "refused"]


class UnansweredError(Exception):
    """A service gave no answer that could hold a reward."""

    def __init__(
        self, reason: UnansweredReason, text: str, status: int | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(without_passwords(text))
        self.reason: UnansweredReason = reason
        """unreachable: the connection failed. refused: the service answered with an error, or the URL is none."""
        self.status = status
        """The HTTP status, where there is one."""
        self.retry_after_s = retry_after_s
        """How long the service wants to be left alone (Retry-After), where it says so."""


class JsonClient:
    """The connections to services. There is no limit on requests at a time: whoever calls has one."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    @property
    def is_closed(self) -> bool:
        return self._closed

    async def close(self) -> None:
        """Close all connections; requests under way end with an error, and there are no more."""
        self._closed = True
        if self._session is not None:
            await self._session.close()

    async def post(self, url: str, body: bytes) -> bytes:
        """The body of the answer with status 200, and not more than one byte above MAX_ANSWER_BYTES of it.

        waits for:    the service's answer, without a limit of its own
        unblocked by: the answer; a cancellation, which closes the connection
        Raises: UnansweredError.
        """
        try:
            return await self._post(url, body)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise UnansweredError("unreachable", f"{url}: {str(error) or type(error).__name__}") from error
        except (aiohttp.ClientError, ValueError) as error:
            raise UnansweredError("refused", f"{url}: {type(error).__name__}: {error}") from error

    async def _post(self, url: str, body: bytes) -> bytes:
        if self._closed:
            raise UnansweredError("unreachable", f"{url}: the client is closed")
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            jar = aiohttp.DummyCookieJar()
            self._session = aiohttp.ClientSession(connector=connector, cookie_jar=jar, auto_decompress=False)
        async with self._session.post(
            url, data=body, headers={"Content-Type": "application/json", **UNCOMPRESSED},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S), allow_redirects=False,
        ) as response:  # fmt: skip
            answer = bytearray()
            async for piece in response.content.iter_chunked(MAX_ANSWER_BYTES):
                answer += piece
                if len(answer) > MAX_ANSWER_BYTES:
                    break
            if 300 <= response.status < 400:
                place = response.headers.get("Location", "nowhere")[:_SHOWN_CHARS]
                text = (
                    f"{url} answered {response.status} and points to {place}: name that place, redirections are not followed"
                )
                raise UnansweredError("refused", text, response.status)
            if response.status != 200:
                shown = answer[:_SHOWN_CHARS].decode(errors="replace")
                wait_s = seconds_to_wait(response.headers.get("Retry-After", ""), response.headers.get("Date", ""))
                raise UnansweredError("refused", f"{url} answered {response.status}: {shown}", response.status, wait_s)
            return bytes(answer[: MAX_ANSWER_BYTES + 1])


def seconds_to_wait(retry_after: str, sent: str) -> float | None:
    """The seconds that a Retry-After header asks for, as a number or a date (RFC 9110, 10.2.3). None: it says nothing.

    ``sent``: the Date header, when the answer was sent by the clock of its sender; without one, the clock here counts.
    """
    text = retry_after.strip()
    if text.isascii() and text.isdigit():
        return min(float(text), _LONGEST_WAIT_S)
    until, now = _date(text), _date(sent) or datetime.now(tz=UTC)
    return None if until is None else min(max(0.0, (until - now).total_seconds()), _LONGEST_WAIT_S)


def _date(text: str) -> datetime | None:
    try:
        date = parsedate_to_datetime(text)
    except ValueError:
        return None
    return date if date.tzinfo is not None else date.replace(tzinfo=UTC)
