"""Targets for HTTP in both directions, and for the logs and metrics that processes write."""

import io
import json
from datetime import UTC, datetime
from functools import cache
from random import Random
from types import SimpleNamespace
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, generate_latest

from gspo_services.broker.metrics_file import MetricsFile
from gspo_services.cli.doctor.observe import last_batches, metrics_of, read_log
from gspo_services.cli.run.supervisor import last_error
from gspo_services.runs.metrics import column, read_metrics
from gspo_services.runs.pace import pace_of
from gspo_services.shared.runtime.telemetry import Health, _application, _Handler
from tests.fuzz.mutate import mutate_bytes, mutate_json_lines, mutate_lines
from tests.fuzz.scratch import written
from tests.fuzz.target import Target, require
from tests.support.clocks import VirtualClock

NOW: Final = datetime(2026, 11, 21, 12, tzinfo=UTC)


class _Wire:
    """The server's end of a connection. The other end has sent ``data`` and hung up."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.sent = bytearray()

    def sendall(self, data: bytes) -> None:
        self.sent += data

    def settimeout(self, _: float) -> None:
        """Ignored: nothing here waits."""

    def setsockopt(self, *_: int) -> None:
        """Ignored: there is no socket."""

    def makefile(self, *_: Any) -> Any:
        return io.BytesIO(self._data)


@cache
def _server() -> Any:
    registry = CollectorRegistry()
    Counter("fuzzed", "Cases.", registry=registry).inc()
    return SimpleNamespace(base_environ={}, get_app=lambda: _application(registry, Health(VirtualClock(), 60.0)))


def request(data: bytes) -> None:
    """Bytes from a stranger at the port of /metrics: an answer to GET, a refusal, or nothing."""
    wire = _Wire(data)
    try:
        _Handler(wire, ("127.0.0.1", 1), _server())
    except OSError:
        return  # the server closed the connection
    sent = bytes(wire.sent)
    if not sent or not sent.startswith(b"HTTP/"):
        return  # answers of HTTP/0.9 have no headers
    status = sent.split(b" ", 2)[1]
    require(status in (b"200", b"400", b"404", b"405", b"414", b"431", b"501", b"503", b"505", b"100"), f"status {status!r}")
    head = sent.partition(b"\r\n\r\n")[0]
    names = [line.partition(b":")[0] for line in head.split(b"\r\n")[1:]]
    known = {b"Server", b"Date", b"Connection", b"Content-Type", b"Content-Length", b"Allow"}
    require(set(names) <= known, f"headers {names}")


@cache
def request_seeds() -> list[bytes]:
    return [
        b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: */*\r\n\r\n",
        b"GET /healthz HTTP/1.0\r\n\r\n",
        b"GET /readyz?a=b HTTP/1.1\r\nConnection: keep-alive\r\nExpect: 100-continue\r\n\r\n",
        b"POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc",
        b"HEAD // HTTP/1.1\r\n\r\n",
        b"GET /nothing\r\n",
        b"OPTIONS * HTTP/9.9\r\nA: b\r\n c\r\n\r\n",
    ]


def page(data: bytes) -> None:
    """A page that ``gspo doctor`` finds at a port of an unknown process: samples, or ValueError."""
    try:
        found = metrics_of(data.decode(errors="replace"))
    except ValueError:
        return
    require(all(isinstance(value, float) for value in found.values()), "a sample is not a number")


@cache
def page_seeds() -> list[bytes]:
    registry = CollectorRegistry()
    counter = Counter("made", "What is made.", ["kind"], registry=registry)
    counter.labels("a").inc(2)
    counter.labels('b"\\\n').inc(3)
    text = b'# HELP x help\n# TYPE x histogram\nx_bucket{le="1"} 2\nx_bucket{le="+Inf"} 3\nx_sum 4\nx_count 3 1700000000\n'
    return [generate_latest(registry), text, b'y NaN\nz{a="b",c="d"} -1e9\n', b"<html>It works</html>"]


def log_lines(data: bytes) -> None:
    """A process's log, which may hold anything: never an error."""
    path = written("process.log", data)
    found = read_log(path, NOW)
    require(found is None or isinstance(found.age_s, float), "an age is not a number")
    last_error(path).encode(errors="strict")


@cache
def log_seeds() -> list[bytes]:
    event = {"event": "stopped_by_error", "timestamp": "2026-11-21T11:00:00+00:00", "error": "no room"}
    line = json.dumps(event).encode()
    return [line + b"\n", b"Traceback\n  File x\nValueError: y\n", line + b'\n{"event": 1, "timestamp": "2026-11-21"}\n']


def record(data: bytes) -> None:
    """A metrics.jsonl that someone has edited: rows, what is left out, and the broker can still append to it."""
    path = written("metrics.jsonl", data)
    pace_of(last_batches(path))
    found = read_metrics(path.parent)
    column(found.batches, "loss")
    require(bool(found.damage) == bool(found.num_damaged), "damage without a line")
    before = MetricsFile(path)
    require(before.last >= 0, f"line {before.last}")
    line = {"line": before.last + 1, "event": "batch", "batch": 3}
    before.append([line])
    after = MetricsFile(path)
    require(after.last == before.last, "the appended line is not the last")
    require(json.loads(path.read_bytes().splitlines()[-1]) == line, "the last line is another one")


@cache
def record_seeds() -> list[bytes]:
    rows = [{"line": n + 1, "event": "batch", "batch": n, "loss": 0.5, "time": 1.5e9, "time_s": 3.0} for n in range(3)]
    rows.append({"line": 4, "event": "dropped", "group_id": 5, "reason": "stale"})
    lines = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    return [lines, lines[:-9], b""]


def mutate_request(data: bytes, rng: Random) -> bytes:
    """Change lines or bytes, and sometimes add a long header. Lines end in CR LF."""
    if rng.random() < 0.1:
        return data.replace(b"\r\n\r\n", b"\r\nX: " + b"y" * rng.choice((100, 70_000)) + b"\r\n\r\n")
    return mutate_lines(data, rng) if rng.random() < 0.6 else mutate_bytes(data, rng)


TARGETS = (
    Target(name="request", run=request, seeds=request_seeds, mutate=mutate_request, cases=300_000),
    Target(name="page", run=page, seeds=page_seeds, mutate=mutate_lines, cases=500_000),
    Target(name="log_lines", run=log_lines, seeds=log_seeds, mutate=mutate_json_lines, cases=200_000),
    Target(name="record", run=record, seeds=record_seeds, mutate=mutate_json_lines, cases=100_000),
)
