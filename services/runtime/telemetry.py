"""/metrics, /healthz and /readyz of one process, served by a thread of its own.

/healthz is 200 while the process's loop turns; /readyz is 200 only while the process can really work and has made progress
lately. Both say why when they are not.
"""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from services.runtime.channel import EndpointError
from services.runtime.clock import Clock

LOOP_STALL_S: Final = 30.0


class Health:
    """What /healthz and /readyz answer. Thread-safe: set by the service, read by the HTTP thread.

    ``max_quiet_s``: ready turns into not ready when ``progress`` was not called for so long.
    """

    def __init__(self, clock: Clock, max_quiet_s: float) -> None:
        self._clock = clock
        self._max_quiet_s = max_quiet_s
        self._lock = threading.Lock()
        self._not_ready = "starting"
        self._last_turn = clock.now()
        self._last_progress = clock.now()

    def turn(self) -> None:
        """The process's loop turned: call it about every second."""
        with self._lock:
            self._last_turn = self._clock.now()

    def progress(self) -> None:
        """Something useful was done (a message handled, a batch trained): ready, and lately so."""
        with self._lock:
            self._last_progress = self._last_turn = self._clock.now()
            self._not_ready = ""

    def not_ready(self, reason: str) -> None:
        """Not able to work, because of ``reason``."""
        with self._lock:
            self._not_ready = reason

    def alive(self) -> tuple[bool, str]:
        with self._lock:
            stalled = self._clock.now() - self._last_turn
        return (True, "alive") if stalled < LOOP_STALL_S else (False, f"the loop has not turned for {stalled:.0f} s")

    def ready(self) -> tuple[bool, str]:
        with self._lock:
            quiet, reason = self._clock.now() - self._last_progress, self._not_ready
        if reason:
            return False, reason
        if quiet > self._max_quiet_s:
            return False, f"no progress for {quiet:.0f} s ({self._max_quiet_s:.0f} s allowed)"
        return True, "ready"


class TelemetryServer:
    """The HTTP server. Use as a context manager; ``port`` is the bound one."""

    def __init__(self, host: str, port: int, registry: CollectorRegistry, health: Health) -> None:
        """Bind. Raises: EndpointError when the port is in use."""
        try:
            self._server = ThreadingHTTPServer((host, port), _handler(registry, health))
        except OSError as error:
            raise EndpointError(
                f"metrics port {host}:{port}: {error.strerror}. Choose another metrics_port in the configuration "
                "(0: any free one)"
            ) from error
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="telemetry", daemon=True)

    def __enter__(self) -> "TelemetryServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _handler(registry: CollectorRegistry, health: Health) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            path = self.path.split("?", 1)[0]
            if path == "/metrics":
                self._answer(200, CONTENT_TYPE_LATEST, generate_latest(registry))
            elif path in ("/healthz", "/readyz"):
                ok, text = health.alive() if path == "/healthz" else health.ready()
                self._answer(200 if ok else 503, "text/plain; charset=utf-8", f"{text}\n".encode())
            else:
                self._answer(404, "text/plain; charset=utf-8", b"try /metrics, /healthz or /readyz\n")

        def _answer(self, status: int, content_type: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Scrapes are not worth a line each."""

    return Handler
