"""One sandbox on one server, as long as the connection to it lasts."""

import random
from collections.abc import Mapping, Sequence
from typing import Final

import aiohttp

from gspo_services.tasks.sandbox.interface import ProgramRefused, RunOutcome, SandboxError, SandboxLimits, SandboxUnavailable
from gspo_services.tasks.sandbox.wire import (
    HEARTBEAT_S,
    MAX_MESSAGE_BYTES,
    SANDBOX_PATH,
    PutFiles,
    RunCommand,
    SandboxDone,
    SandboxFailed,
    SandboxRefused,
    SandboxRequest,
    WireError,
    answer_of,
    packed,
)

CONNECT_S: Final = 10.0
ACQUIRE_S: Final = 90.0
"""How long a server may let a client wait for a sandbox; it says sooner that it has none."""
RETRY_S: Final = 1.0
LONGEST_RETRY_S: Final = 60.0
SHOWN_CHARS: Final = 300
WRONG_KEY: Final = "set GSPO_SANDBOX_KEY here to what it is where `gspo sandbox` runs"


class ServerBusy(SandboxError):
    """A server gives no sandbox now; ``retry_s`` is when to ask again."""

    def __init__(self, text: str, retry_s: float) -> None:
        super().__init__(text)
        self.retry_s = retry_s


class SandboxLost(SandboxError):
    """The connection, the server or the sandbox has ended before it answered."""


class ServerSandbox:
    """A sandbox on a server. See ``Sandbox``; additionally everything may raise SandboxLost."""

    def __init__(self, url: str, socket: aiohttp.ClientWebSocketResponse, answer_s: float) -> None:
        self._url = url
        self._socket = socket
        self._answer_s = answer_s

    async def put(self, files: Mapping[str, bytes]) -> None:
        """See ``Sandbox.put``."""
        answer = await self._ask(PutFiles(names=list(files)), list(files.values()), self._answer_s)
        if not isinstance(answer, SandboxDone):
            raise SandboxLost(f"{self._url} answers files with {type(answer).__name__}")

    async def run(self, command: Sequence[str], limits: SandboxLimits, stdin: bytes, *, prepares: bool) -> RunOutcome:
        """See ``Sandbox.run`` and ``Sandbox.prepare``."""
        request = RunCommand(command=list(command), prepares=prepares, limits=limits)
        answer = await self._ask(request, [stdin], limits.wall_s + self._answer_s)
        if not isinstance(answer, RunOutcome):
            raise SandboxLost(f"{self._url} answers a run with {type(answer).__name__}")
        return answer

    async def close(self) -> None:
        """End the sandbox, and everything in it."""
        await self._socket.close()

    async def _ask(self, request: SandboxRequest, blobs: Sequence[bytes], answer_s: float) -> SandboxDone | RunOutcome:
        try:
            message = packed(request, *blobs)
        except WireError as error:
            raise ProgramRefused(str(error)) from error
        try:
            await self._socket.send_bytes(message)
            received = await self._socket.receive(timeout=answer_s)
        except TimeoutError as error:
            raise SandboxLost(f"{self._url} has said nothing for {answer_s:g} s") from error
        except (aiohttp.ClientError, OSError, RuntimeError) as error:
            raise SandboxLost(f"{self._url}: {str(error) or type(error).__name__}") from error
        if received.type is not aiohttp.WSMsgType.BINARY:
            said = str(received.extra or "")[:SHOWN_CHARS]
            raise SandboxLost(f"{self._url} has ended the sandbox{': ' + said if said else ''}")
        try:
            answer = answer_of(received.data)
        except WireError as error:
            raise SandboxLost(f"{self._url}: {error}") from error
        if isinstance(answer, SandboxRefused):
            raise ProgramRefused(answer.text[:SHOWN_CHARS])
        if isinstance(answer, SandboxFailed):
            raise SandboxLost(f"{self._url}: {answer.text[:SHOWN_CHARS]}")
        return answer


async def connect(session: aiohttp.ClientSession, url: str, key: str, answer_s: float) -> ServerSandbox:
    """A sandbox on the server at ``url``.

    waits for:    a free sandbox at the server, at most ACQUIRE_S
    unblocked by: a free sandbox; the server's refusal
    Raises: SandboxUnavailable for a server that will never give one; ServerBusy; SandboxLost.
    """
    timeout = aiohttp.ClientWSTimeout(ws_close=1.0)
    try:
        socket = await session.ws_connect(
            url.rstrip("/") + SANDBOX_PATH, headers={"Authorization": f"Bearer {key}"} if key else {}, heartbeat=HEARTBEAT_S,
            max_msg_size=MAX_MESSAGE_BYTES, compress=0, timeout=timeout,
        )  # fmt: skip
    except aiohttp.WSServerHandshakeError as error:
        raise _refusal(url, error) from error
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise SandboxLost(f"{url} cannot be reached: {str(error) or type(error).__name__}") from error
    return ServerSandbox(url, socket, answer_s)


def _refusal(url: str, error: aiohttp.WSServerHandshakeError) -> SandboxError:
    if error.status == 401:
        return SandboxUnavailable(f"{url} refuses the key: {WRONG_KEY}")
    if error.status in (429, 503):
        return ServerBusy(f"{url} has no free sandbox (status {error.status})", _retry_s(error))
    if 400 <= error.status < 500 or error.status == 101:
        text = f"{url} answers {SANDBOX_PATH} with status {error.status}: it is no `gspo sandbox`, or of another release"
        return SandboxUnavailable(f"{text}; correct sandbox.urls")
    return SandboxLost(f"{url} answers with status {error.status}")


def _retry_s(error: aiohttp.WSServerHandshakeError) -> float:
    """Seconds until the server wants to be asked again, spread so that clients do not come together."""
    said = error.headers.get("Retry-After", "") if error.headers is not None else ""
    asked = float(said) if said.isdecimal() and len(said) < 6 else RETRY_S
    return min(asked, LONGEST_RETRY_S) * random.uniform(0.5, 1.5)
