"""/metrics, /healthz and /readyz of one process, served by a thread of its own.

/healthz is 200 while the process's loop turns; /readyz is 200 only while the process can really work and has made progress
lately. Both say why when they are not.
"""

import io
import socket
import sys
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

import structlog
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from services.runtime.clock import Clock
from services.runtime.errors import EndpointError

log = structlog.get_logger()

LOOP_STALL_S: Final = 30.0
MAX_CONNECTIONS: Final = 64
MAX_REQUEST_BYTES: Final = 16 * 1024
REQUEST_S: Final = 5.0
ANSWER_S: Final = 10.0
"""For a whole answer to be taken."""


class Health:
    """What /healthz and /readyz answer. Thread-safe: set by the service, read by the HTTP thread.

    ``max_quiet_s``: ready turns into not ready when ``progress`` was not called for so long. ``max_stall_s``: the same of
    alive and ``beat``; infinite for a process without a loop, which is alive if it answers at all.
    """

    def __init__(self, clock: Clock, max_quiet_s: float, *, max_stall_s: float = LOOP_STALL_S) -> None:
        self._clock = clock
        self._max_quiet_s = max_quiet_s
        self._max_stall_s = max_stall_s
        self._lock = threading.Lock()
        self._not_ready = "starting"
        self._last_beat = clock.now()
        self._last_progress = clock.now()

    def beat(self) -> None:
        """Say that the process's event loop still runs; call it about every second."""
        with self._lock:
            self._last_beat = self._clock.now()

    def progress(self) -> None:
        """Something useful was done (a message handled, a batch trained): ready, and lately so."""
        with self._lock:
            self._last_progress = self._last_beat = self._clock.now()
            self._not_ready = ""

    def not_ready(self, reason: str) -> None:
        """Not able to work, because of ``reason``."""
        with self._lock:
            self._not_ready = reason

    def alive(self) -> tuple[bool, str]:
        with self._lock:
            stalled = self._clock.now() - self._last_beat
        return (True, "alive") if stalled < self._max_stall_s else (False, f"the loop has not turned for {stalled:.0f} s")

    def ready(self) -> tuple[bool, str]:
        with self._lock:
            quiet, reason = self._clock.now() - self._last_progress, self._not_ready
        if reason:
            return False, reason
        if quiet > self._max_quiet_s:
            return False, f"no progress for {quiet:.0f} s ({self._max_quiet_s:.0f} s allowed)"
        return True, "ready"


class TelemetryServer:
    """The HTTP server: GET of three paths, nothing else. Use as a context manager; ``port`` is the bound one."""

    def __init__(
        self, host: str, port: int, registry: CollectorRegistry, health: Health, *, request_s: float = REQUEST_S
    ) -> None:
        """Bind. ``request_s``: for a whole request to arrive. Raises: EndpointError when the address cannot be had."""
        try:
            self._server = _Server((host, port), _handler(registry, health, request_s))
        except OSError as error:
            raise EndpointError(
                f"metrics port {host}:{port}: {error.strerror}. Choose another metrics_port in the configuration "
                "(0: any free one), or another security.metrics_host"
            ) from error
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="telemetry", daemon=True)

    def __enter__(self) -> "TelemetryServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    """At most MAX_CONNECTIONS at a time: a newer one ends the oldest, so that whoever dawdles keeps nobody out."""

    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(address, handler)
        self._open: OrderedDict[int, socket.socket] = OrderedDict()
        self._lock = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open[id(request)] = request
            oldest = self._open.popitem(last=False)[1] if len(self._open) > MAX_CONNECTIONS else None
        if oldest is not None:
            _hang_up(oldest)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(id(request), None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no event; anything else is a bug of ours and is logged with its traceback."""
        error = sys.exception()
        if not isinstance(error, OSError):
            log.error("telemetry_failed", exc_info=error)


def _hang_up(request: socket.socket) -> None:
    """Wake the thread that reads or writes here; it closes the connection."""
    with suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


class _Request(io.RawIOBase):
    """What a client sends: so many bytes within so many seconds for the whole request, however it dribbles."""

    def __init__(self, connection: socket.socket, request_s: float) -> None:
        self._connection = connection
        self._deadline = time.monotonic() + request_s
        self._left = MAX_REQUEST_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Raises: TimeoutError, also when the request is too large: either way there is no answer."""
        left_s = self._deadline - time.monotonic()
        if left_s <= 0 or self._left <= 0:
            raise TimeoutError("the request is too slow or too large")
        self._connection.settimeout(left_s)
        size = self._connection.recv_into(memoryview(buffer)[: self._left])
        self._left -= size
        return size


def _handler(registry: CollectorRegistry, health: Health, request_s: float) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server_version = "gspo"
        sys_version = ""

        def setup(self) -> None:
            super().setup()
            self.rfile = io.BufferedReader(_Request(self.connection, request_s), 1024)

        def do_GET(self) -> None:
            path = self.path.split("?", 1)[0]
            if path == "/metrics":
                self._answer(200, CONTENT_TYPE_LATEST, generate_latest(registry))
            elif path in ("/healthz", "/readyz"):
                ok, text = health.alive() if path == "/healthz" else health.ready()
                self._answer(200 if ok else 503, "text/plain; charset=utf-8", f"{text}\n".encode())
            else:
                self._answer(404, "text/plain; charset=utf-8", b"try /metrics, /healthz or /readyz\n")

        def _refuse_method(self) -> None:
            self._answer(405, "text/plain; charset=utf-8", b"GET only\n")

        do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = _refuse_method

        def _answer(self, status: int, content_type: str, body: bytes) -> None:
            self.close_connection = True
            self.connection.settimeout(ANSWER_S)
            self.send_response(status)
            if status == 405:
                self.send_header("Allow", "GET")
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(b"" if self.command == "HEAD" else body)

        def log_message(self, *_: object) -> None:
            """Scrapes are not worth a line each."""

    return Handler
