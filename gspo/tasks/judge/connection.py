"""The connection to a judge: openai's client, which retries, with limits that hold over processes."""

from __future__ import annotations

import hashlib
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

import anyio.to_thread
import httpx
import openai

from gspo.tasks.judge.limits import Pace, RequestPlaces

_LONGEST_POSTPONED_S: Final = 60.0
_SHOWN_CHARS: Final = 500
_ANSWER_BYTES: Final = 16 * 2**20


class JudgeError(RuntimeError):
    """A judge gave no usable answer; the text says why, and what to do. The attempt then has no reward."""


class JudgeConnection:
    """One model at one place, from one event loop."""

    def __init__(self, model: str, timeout_s: float, max_retries: int, base_url: str | None, api_key: str | None) -> None:
        """As in ``Judge``. Raises: openai.OpenAIError."""
        hooks: dict[str, list[Any]] = {"request": [self._await_turn], "response": [self._heed]}
        self._client = openai.AsyncOpenAI(
            base_url=base_url, api_key=api_key, timeout=timeout_s, max_retries=max_retries,
            http_client=_BoundedClient(timeout_s, hooks),
        )  # fmt: skip
        self._timeout_s = timeout_s
        self._num_tries = max_retries + 1
        self.base_url = str(self._client.base_url)
        self._where = f"{model} at {self.base_url}"
        self._digest = hashlib.blake2b(f"{model}\n{self.base_url}".encode(), digest_size=8).hexdigest()
        self._pace: Pace | None = None
        self._places: RequestPlaces | None = None

    def limit(self, folder: Path, requests_per_minute: float | None, concurrency: int | None) -> None:
        """Share limits with all connections to the same model that name ``folder``."""
        if requests_per_minute is not None:
            self._pace = Pace(folder / f"pace-{self._digest}", requests_per_minute)
        if concurrency is not None:
            self._places = RequestPlaces(folder / f"places-{self._digest}", concurrency)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send one request; returns a map with at least one choice. Raises: JudgeError; OSError for the limits' files."""
        async with self._places.one() if self._places else nullcontext():
            body = await self._body(request)
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise JudgeError(f"{self._where} answered with something that is not JSON: {shown(body)}") from error
        if not has_choices(answer):
            raise JudgeError(f"{self._where} answered without choices: {shown(body)}")
        return dict(answer)

    async def _body(self, request: dict[str, Any]) -> str:
        try:
            response = await self._client.chat.completions.with_raw_response.create(**request)
        except openai.APITimeoutError as error:
            tries = f"{self._num_tries} tries" if self._num_tries > 1 else "one try"
            raise JudgeError(f"{self._where} did not answer within {self._timeout_s} s, in {tries}") from error
        except openai.APIConnectionError as error:
            if isinstance(error.__cause__, OSError):
                raise error.__cause__ from None  # of the limits' files
            reason = error.__cause__ or error
            raise JudgeError(
                f"{self._where} cannot be reached: {reason} (reward code has the network only with reward.network = true)"
            ) from error
        except openai.APIStatusError as error:
            hint = " (reward code gets a key only if reward.variables names it)" if error.status_code in (401, 403) else ""
            raise JudgeError(f"{self._where} answered {error.status_code}: {shown(error.response.text)}{hint}") from error
        except openai.OpenAIError as error:
            raise JudgeError(f"{self._where}: {type(error).__name__}: {error}") from error
        text: str = response.text
        return text

    async def _await_turn(self, request: httpx.Request) -> None:
        """Wait for the limits before each try, so that retries keep the pace, too."""
        if self._pace is not None:
            await self._pace.wait()

    async def _heed(self, response: httpx.Response) -> None:
        """Make all workers wait when the server told one to."""
        if self._pace is None or response.status_code != 429:
            return
        try:
            seconds = float(response.headers.get("retry-after", ""))
        except ValueError:
            return  # none, or a date
        await anyio.to_thread.run_sync(self._pace.postpone, min(seconds, _LONGEST_POSTPONED_S))


class _BoundedClient(openai.DefaultAsyncHttpxClient):
    """Bounds an answer to its last byte, in seconds and bytes: httpx's timeout begins anew with each piece."""

    def __init__(self, timeout_s: float, hooks: dict[str, list[Any]]) -> None:
        # What is sent is what is held, and a redirection is an answer as any other.
        super().__init__(event_hooks=hooks, headers={"Accept-Encoding": "identity"}, follow_redirects=False)
        self._timeout_s = timeout_s

    async def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
        with anyio.move_on_after(self._timeout_s):
            response = await super().send(request, **{**options, "stream": True})
            try:
                content = await _content(response)
            finally:
                with anyio.CancelScope(shield=True):
                    await response.aclose()
            return httpx.Response(response.status_code, headers=response.headers, content=content, request=request)
        raise httpx.ReadTimeout(f"no answer within {self._timeout_s} s", request=request)


async def _content(response: httpx.Response) -> bytes:
    if "content-encoding" in response.headers:
        raise httpx.DecodingError("the answer is compressed, which was not asked for", request=response.request)
    content = bytearray()
    async for piece in response.aiter_raw():
        content += piece
        if len(content) > _ANSWER_BYTES:
            raise httpx.ReadError(f"the answer has more than {_ANSWER_BYTES:,} bytes", request=response.request)
    return bytes(content)


def has_choices(answer: object) -> bool:
    """Return whether ``answer`` looks like a chat completion, as far as needed here."""
    return isinstance(answer, dict) and isinstance(answer.get("choices"), list) and bool(answer["choices"])


def shown(value: object) -> str:
    """``value`` for an error's text."""
    text = value if isinstance(value, str) else repr(value)
    return text[:_SHOWN_CHARS] + ("..." if len(text) > _SHOWN_CHARS else "")
