"""/metrics, /startupz, /healthz and /readyz of one process, served by its own thread.

/startupz is 200 once the process has opened all that it needs, such as SGLang with its model, and stays so. /healthz is 200
while the process's event loop runs. /readyz is 200 only while the process can really work and has made progress lately.
Otherwise they are 503 and say why.
"""

import io
import socket
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final, TextIO
from wsgiref.simple_server import WSGIRequestHandler, make_server
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

import structlog
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from gspo_services.shared.runtime.clock import Clock
from gspo_services.shared.runtime.connection_places import ConnectionPlaces
from gspo_services.shared.runtime.errors import EndpointError

log = structlog.get_logger()

LOOP_STALL_S: Final = 30.0
MAX_CONNECTIONS: Final = 64
SILENT_S: Final = 5.0
"""Time for a client to send its next bytes, and to receive the whole answer."""


class Health:
    """What /startupz, /healthz and /readyz answer. Thread-safe: the service sets it, the HTTP threads read it.

    The process is not ready after ``max_quiet_s`` without ``progress``, and not alive after ``max_stall_s`` without a
    ``beat``. A process without an event loop has an infinite ``max_stall_s``: it is alive if it answers at all.
    """

    def __init__(self, clock: Clock, max_quiet_s: float, *, max_stall_s: float = LOOP_STALL_S) -> None:
        self._clock = clock
        self._max_quiet_s = max_quiet_s
        self._max_stall_s = max_stall_s
        self._lock = threading.Lock()
        self._not_ready = "starting"
        self._must_wait = ""
        self._has_started = False
        self._last_beat = clock.now()
        self._last_progress = clock.now()

    def beat(self) -> None:
        """Note that the process's event loop still runs. Call this about every second."""
        with self._lock:
            self._last_beat = self._clock.now()

    def opened(self) -> None:
        """Note that everything the process needs is open: whatever is missing from now on is not part of its start."""
        with self._lock:
            self._has_started = True

    def progress(self) -> None:
        """Note that something useful was done, such as a message handled or a batch trained: the process is ready."""
        with self._lock:
            self._has_started = True
            self._last_progress = self._last_beat = self._clock.now()
            self._not_ready = ""

    def not_ready(self, reason: str) -> None:
        """Note that the process cannot work, because of ``reason``, until the next ``progress``."""
        with self._lock:
            self._not_ready = reason

    def must_wait(self, reason: str) -> None:
        """Keep the process not ready because of ``reason``, whatever progress it makes, until this is called without one."""
        with self._lock:
            self._must_wait = reason

    def started(self) -> tuple[bool, str]:
        with self._lock:
            return (True, "started") if self._has_started else (False, self._not_ready)

    def alive(self) -> tuple[bool, str]:
        with self._lock:
            stalled = self._clock.now() - self._last_beat
        return (
            (True, "alive") if stalled < self._max_stall_s else (False, f"the event loop has been stuck for {stalled:.0f} s")
        )

    def ready(self) -> tuple[bool, str]:
        with self._lock:
            quiet, reason = self._clock.now() - self._last_progress, self._not_ready or self._must_wait
        if reason:
            return False, reason
        if quiet > self._max_quiet_s:
            return False, f"no progress for {quiet:.0f} s ({self._max_quiet_s:.0f} s allowed)"
        return True, "ready"


class TelemetryServer:
    """Answers GET of four paths, nothing else. Use as a context manager; ``port`` is the bound one."""

    def __init__(
        self, host: str, port: int, registry: CollectorRegistry, health: Health, *, silent_s: float = SILENT_S
    ) -> None:
        """Bind. A client that is silent for ``silent_s`` is disconnected.

        Raises: EndpointError when the port is taken or the address is not of this host.
        """
        handler = type("Handler", (_Handler,), {"timeout": silent_s})
        try:
            self._server = make_server(host, port, _application(registry, health), _Server, handler)
        except OSError as error:
            raise EndpointError(
                f"metrics port {host}:{port}: {error.strerror}. Choose another metrics_port in the configuration "
                "(0: any free one), or another security.metrics_host"
            ) from error
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="telemetry", daemon=True)

    def __enter__(self) -> "TelemetryServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _application(registry: CollectorRegistry, health: Health) -> WSGIApplication:
    metrics = make_wsgi_app(registry)
    answers = {"/startupz": health.started, "/healthz": health.alive, "/readyz": health.ready}

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        if method == "GET" and path == "/metrics":
            try:
                # The text format, whatever the client accepts: SGLang's samples pass through here in it.
                page: Iterable[bytes] = metrics({**environ, "HTTP_ACCEPT": ""}, start_response)
                return page
            except Exception as error:
                log.error("telemetry_failed", exc_info=error)
                status, text = "500 Internal Server Error", "a metric cannot be read; the log of this process says why"
        elif method != "GET":
            status, text = "405 Method Not Allowed", "GET only"
        elif path in answers:
            ok, text = answers[path]()
            status = "200 OK" if ok else "503 Service Unavailable"
        else:
            status, text = "404 Not Found", "try /metrics, /startupz, /healthz or /readyz"
        allow = [("Allow", "GET")] if method != "GET" else []
        start_response(status, [("Content-Type", "text/plain; charset=utf-8"), *allow])
        return [] if method == "HEAD" else [f"{text}\n".encode()]

    return answer


class _Handler(WSGIRequestHandler):
    """One request of one connection, without a line in the log."""

    def log_message(self, *_: object) -> None:
        """Log nothing: scrapes are not worth a line each."""

    def get_stderr(self) -> TextIO:
        """Where the library prints the traceback of a client that does not take its answer: nowhere."""
        return io.StringIO()


class _Server(ThreadingWSGIServer):
    """At most MAX_CONNECTIONS at a time: a newer one ends an older one, so that slow clients keep nobody out."""

    request_queue_size = MAX_CONNECTIONS

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler]) -> None:
        super().__init__(address, handler)
        self._open: ConnectionPlaces[socket.socket] = ConnectionPlaces(MAX_CONNECTIONS)
        self._lock = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            oldest = self._open.come(request, client_address[0])
        if oldest is not None:
            with suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads or writes there; it closes the connection
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.gone(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that is silent or hangs up; anything else is a bug and is logged with its traceback."""
        error = sys.exception()
        if not isinstance(error, OSError):
            log.error("telemetry_failed", exc_info=error)
