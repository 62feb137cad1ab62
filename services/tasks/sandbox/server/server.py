"""The HTTP server of sandboxes: who gets a sandbox, and when."""

import asyncio
import hmac
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

import msgspec
import structlog
from aiohttp import WSCloseCode, web

from gspo_services.shared.runtime.http_listener import listen
from gspo_services.shared.runtime.plain_text import one_line
from gspo_services.tasks.sandbox import Sandbox, SandboxError, Sandboxes
from gspo_services.tasks.sandbox.server.conversation import SandboxBounds, SandboxConversation
from gspo_services.tasks.sandbox.server.metrics import SandboxMetrics
from gspo_services.tasks.sandbox.wire import INFO_PATH, MAX_MESSAGE_BYTES, SANDBOX_PATH, VERSION, SandboxInfo

log = structlog.get_logger()

MOST_WAIT_S: Final = 20.0
"""A client that has waited so long is told to come again: perhaps another server has room by then."""
RETRY_S: Final = 1
RETRY_STOPPING_S: Final = 5
DRAINING: Final = "this server stops: ask another one"
SPARE_CONNECTIONS: Final = 64
"""For those that are told why they get no sandbox."""
REQUEST_S: Final = 10.0
"""For a whole request: half of one keeps a connection from somebody else."""
CLOSE_S: Final = 2.0
"""For a client to take what was sent to it before its end."""


class NoSandbox(Exception):
    """A request that gets no sandbox."""

    def __init__(self, status: int, reason: str, text: str, retry_s: int | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.reason = reason
        self.retry_s = retry_s


class SandboxServer:
    """Gives sandboxes to whoever has the key, at most ``max_sandboxes`` at a time. Call ``start``, and ``stop`` at the end.

    produces:     sandboxes, each on a WebSocket
    waits for:    clients; a free sandbox
    unblocked by: the end of another client's sandbox; MOST_WAIT_S; ``stop``
    """

    def __init__(
        self,
        sandboxes: Sandboxes,
        metrics: SandboxMetrics,
        bounds: SandboxBounds,
        *,
        max_sandboxes: int,
        max_waiting: int,
        key: str = "",
        memory: str = "",
    ) -> None:
        """``max_sandboxes``: as many as ``sandboxes`` gives. ``key``: empty where everybody who gets here may use it.
        ``memory``: what counts the memory of programs, in words."""
        self._memory = memory
        self._sandboxes = sandboxes
        self._metrics = metrics
        self._bounds = bounds
        self._max_sandboxes = max_sandboxes
        self._max_waiting = max_waiting
        self._key = key.encode()
        self._num_used = 0
        self._num_waiting = 0
        self._draining = False
        self._waits: set[asyncio.Timeout] = set()
        self._sockets: dict[web.WebSocketResponse, web.BaseRequest] = {}
        self._none_open = asyncio.Event()
        self._none_open.set()
        self._runner: web.ServerRunner | None = None
        metrics.max_sandboxes.set(max_sandboxes)

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen; gives the address. Raises: EndpointError when the port is taken or the address is not of this host."""
        most = self._max_sandboxes + self._max_waiting + SPARE_CONNECTIONS
        self._runner = await listen(self._serve, host, port, most, head_s=REQUEST_S, idle_s=REQUEST_S)
        address: tuple[str, int] = self._runner.addresses[0][:2]
        return address

    async def stop(self, budget_s: float) -> None:
        """Give no more sandboxes, wait for those in use, and cut off what takes longer than ``budget_s``."""
        self._draining = True
        for wait in self._waits:
            wait.reschedule(asyncio.get_running_loop().time())
        try:
            async with asyncio.timeout(budget_s):
                await self._none_open.wait()
        except TimeoutError:
            log.warning("sandbox_drain_incomplete", sandboxes=len(self._sockets), budget_s=budget_s)
            ends = (self._close(*each, WSCloseCode.GOING_AWAY, b"the server stops") for each in self._sockets.items())
            await asyncio.gather(*ends)
        if self._runner is not None:
            await self._runner.cleanup()

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await self._route(request)
        except NoSandbox as refused:
            self._metrics.turned_away.labels(reason=refused.reason).inc()
            headers = {} if refused.retry_s is None else {"Retry-After": str(refused.retry_s)}
            return web.Response(status=refused.status, text=f"{refused}\n", headers=headers)

    async def _route(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path not in (SANDBOX_PATH, INFO_PATH):
            served = f"{SANDBOX_PATH} and {INFO_PATH} are, version {VERSION}"
            raise NoSandbox(404, "path", f"{one_line(request.path, 100)} is not served: {served}")
        if request.method != "GET":
            raise NoSandbox(405, "path", f"{request.path} takes GET only")
        said = request.headers.get("Authorization", "").removeprefix("Bearer ").encode(errors="surrogateescape")
        if self._key and not hmac.compare_digest(said, self._key):
            raise NoSandbox(401, "key", "the key is missing or wrong: set GSPO_SANDBOX_KEY to what it is at this server")
        if request.path == INFO_PATH:
            return web.Response(body=msgspec.json.encode(self._info()), content_type="application/json")
        if request.headers.get("Upgrade", "").lower() != "websocket":
            raise NoSandbox(426, "request", f"{SANDBOX_PATH} is a WebSocket: send Upgrade: websocket")
        async with self._acquired() as sandbox:
            return await self._converse(request, sandbox)

    async def _converse(self, request: web.BaseRequest, sandbox: Sandbox) -> web.StreamResponse:
        # No heartbeat: a client between two requests does not read. One that vanished is found by ``idle_s``.
        socket = web.WebSocketResponse(max_msg_size=MAX_MESSAGE_BYTES, compress=False, timeout=1.0)
        try:
            await socket.prepare(request)
        except web.HTTPException as error:
            raise NoSandbox(400, "request", f"no WebSocket handshake: {error.text or error.reason}") from error
        self._sockets[socket] = request
        try:
            await SandboxConversation(socket, sandbox, self._bounds, self._metrics).run()
        except* ConnectionError:
            pass  # The client has gone between its request and our answer.
        finally:
            del self._sockets[socket]
            await self._close(socket, request, WSCloseCode.OK, b"")
        return socket

    async def _close(self, socket: web.WebSocketResponse, request: web.BaseRequest, code: int, said: bytes) -> None:
        """End a connection. One that takes nothing any more is cut off, with what was to be sent."""
        transport = request.transport
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await socket.close(code=code, message=said)
        finally:
            if transport is not None and transport.get_write_buffer_size():
                transport.abort()

    @asynccontextmanager
    async def _acquired(self) -> AsyncIterator[Sandbox]:
        """A sandbox. Raises: NoSandbox when there is none soon."""
        if self._draining:
            raise NoSandbox(503, "draining", DRAINING, RETRY_STOPPING_S)
        if self._num_waiting >= self._max_waiting and self._num_used >= self._max_sandboxes:
            raise NoSandbox(
                429, "busy", f"all {self._max_sandboxes} sandboxes are in use and {self._num_waiting} wait", RETRY_S
            )
        began = time.monotonic()
        opened = self._sandboxes.acquire()
        self._count(waiting=1)
        try:
            async with asyncio.timeout(MOST_WAIT_S) as end:
                self._waits.add(end)
                sandbox = await opened.__aenter__()
        except TimeoutError as error:
            if self._draining:
                raise NoSandbox(503, "draining", DRAINING, RETRY_STOPPING_S) from error
            raise NoSandbox(429, "busy", f"no free sandbox within {MOST_WAIT_S:g} s", RETRY_S) from error
        except SandboxError as error:
            log.error("sandbox_not_started", error=str(error))
            raise NoSandbox(503, "failed", f"no sandbox can be started: {one_line(str(error))}", RETRY_STOPPING_S) from error
        finally:
            self._waits.discard(end)
            self._count(waiting=-1)
        self._metrics.wait_seconds.observe(time.monotonic() - began)
        self._count(used=1)
        try:
            yield sandbox
        finally:
            try:
                await opened.__aexit__(None, None, None)
            finally:
                self._count(used=-1)

    def _count(self, *, used: int = 0, waiting: int = 0) -> None:
        self._num_used += used
        self._num_waiting += waiting
        self._metrics.used.set(self._num_used)
        self._metrics.waiting.set(self._num_waiting)
        if self._num_used or self._num_waiting:
            self._none_open.clear()
        else:
            self._none_open.set()

    def _info(self) -> SandboxInfo:
        return SandboxInfo(
            version=VERSION, max_sandboxes=self._max_sandboxes, used=self._num_used, waiting=self._num_waiting,
            max_wall_s=self._bounds.max_wall_s, max_memory_bytes=self._bounds.max_memory_bytes,
            memory=self._memory,
        )  # fmt: skip
