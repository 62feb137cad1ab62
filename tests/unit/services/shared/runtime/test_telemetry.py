"""Health tied to progress, in virtual time, and what the HTTP endpoints say of it."""

import math
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from email.message import Message
from http.client import HTTPConnection

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Metric
from prometheus_client.registry import Collector
from structlog.testing import capture_logs

from gspo_services.shared.runtime.errors import EndpointError
from gspo_services.shared.runtime.telemetry import LOOP_STALL_S, MAX_CONNECTIONS, Health, TelemetryServer
from tests.support.clocks import VirtualClock


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def health(clock: VirtualClock) -> Health:
    return Health(clock, max_quiet_s=60.0)


def test_a_starting_process_is_alive_and_not_ready(health: Health) -> None:
    assert health.alive() == (True, "alive")
    assert health.ready() == (False, "starting")


def test_a_process_has_started_once_all_is_open_and_then_for_good(health: Health) -> None:
    assert health.started() == (False, "starting")
    health.beat()
    assert not health.started()[0], "a beat says only that the event loop runs"
    health.opened()
    health.not_ready("the broker is away")
    assert health.started() == (True, "started")
    assert health.ready() == (False, "the broker is away")


def test_progress_makes_a_process_ready_until_it_has_been_quiet_too_long(health: Health, clock: VirtualClock) -> None:
    health.progress()
    assert health.ready() == (True, "ready")
    clock.advance(60)
    assert health.ready()[0]
    clock.advance(1)
    assert health.ready() == (False, "no progress for 61 s (60 s allowed)")
    health.progress()
    assert health.ready()[0]


def test_a_beat_is_life_and_no_progress(health: Health, clock: VirtualClock) -> None:
    health.progress()
    clock.advance(100)
    health.beat()
    assert health.alive()[0]
    assert not health.ready()[0]


def test_a_process_is_not_alive_while_its_event_loop_is_stuck(health: Health, clock: VirtualClock) -> None:
    health.beat()
    clock.advance(LOOP_STALL_S)
    assert health.alive() == (False, "the event loop has been stuck for 30 s")


def test_a_process_without_an_event_loop_is_alive_as_long_as_it_answers(clock: VirtualClock) -> None:
    health = Health(clock, max_quiet_s=60.0, max_stall_s=math.inf)
    clock.advance(1e6)
    assert health.alive() == (True, "alive")


def test_a_process_that_must_wait_is_not_ready_whatever_progress_it_makes(health: Health) -> None:
    health.progress()
    health.must_wait("the place of the leader cannot be renewed")
    health.progress()
    assert health.ready() == (False, "the place of the leader cannot be renewed")
    health.must_wait("")
    assert health.ready() == (True, "ready")


def test_a_process_is_not_ready_until_the_next_progress(health: Health) -> None:
    health.progress()
    health.not_ready("quarantined: wrong digest")
    health.beat()
    assert health.ready() == (False, "quarantined: wrong digest")
    health.progress()
    assert health.ready()[0]


@dataclass(frozen=True, kw_only=True)
class Answer:
    status: int
    headers: Message
    text: str


def ask(server: str, path: str, method: str = "GET") -> Answer:
    with closing(HTTPConnection(server, timeout=60)) as connection:
        connection.request(method, path)
        response = connection.getresponse()
        return Answer(status=response.status, headers=response.headers, text=response.read().decode())


@pytest.fixture
def server(health: Health) -> Iterator[str]:
    registry = CollectorRegistry()
    Counter("gspo_test_events_total", "Events", registry=registry).inc(3)
    with TelemetryServer("127.0.0.1", 0, registry, health) as telemetry:
        yield f"127.0.0.1:{telemetry.port}"


def test_the_endpoints_answer_what_health_says(server: str, health: Health, clock: VirtualClock) -> None:
    def answer(path: str) -> tuple[int, str]:
        response = ask(server, path)
        return response.status, response.text.strip()

    assert answer("/healthz") == (200, "alive")
    assert answer("/readyz") == (503, "starting")
    health.progress()
    assert answer("/readyz?verbose=1") == (200, "ready")
    clock.advance(61)
    assert answer("/readyz") == (503, "no progress for 61 s (60 s allowed)")
    assert answer("/healthz") == (503, "the event loop has been stuck for 61 s")
    assert answer("/other")[0] == 404


def test_metrics_come_in_prometheus_text(server: str) -> None:
    response = ask(server, "/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    assert "gspo_test_events_total 3.0" in response.text


def test_a_metrics_port_in_use_is_named_with_the_way_out(server: str, health: Health) -> None:
    port = int(server.rsplit(":", 1)[1])
    with pytest.raises(EndpointError, match=f"{port}.*Choose another metrics_port"):
        TelemetryServer("127.0.0.1", port, CollectorRegistry(), health)


@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
def test_only_get_is_answered(server: str, method: str) -> None:
    response = ask(server, "/metrics", method)
    assert (response.status, response.headers["allow"]) == (405, "GET")


def connection_to(server: str) -> socket.socket:
    host, _, port = server.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=60)


def test_slow_clients_keep_nobody_out(health: Health) -> None:
    health.progress()
    with ExitStack() as stack:
        telemetry = stack.enter_context(TelemetryServer("127.0.0.1", 0, CollectorRegistry(), health, silent_s=60.0))
        server = f"127.0.0.1:{telemetry.port}"
        slow = [stack.enter_context(connection_to(server)) for _ in range(MAX_CONNECTIONS + 8)]
        for connection in slow:
            connection.sendall(b"GET /metr")
        assert ask(server, "/readyz").status == 200
        assert slow[0].recv(10) == b"", "the oldest is hung up on"
        slow[-1].sendall(b"ics HTTP/1.1\r\n\r\n")
        assert slow[-1].recv(12) == b"HTTP/1.0 200"


@pytest.mark.parametrize("sent", [b"", b"GET /metr", b"GET /metrics HTTP/1.1\r\nHost: x"])
def test_a_client_that_says_nothing_more_is_disconnected_without_a_word_in_the_log(
    sent: bytes, health: Health, capfd: pytest.CaptureFixture[str]
) -> None:
    with ExitStack() as stack:
        telemetry = stack.enter_context(TelemetryServer("127.0.0.1", 0, CollectorRegistry(), health, silent_s=0.3))
        silent = stack.enter_context(connection_to(f"127.0.0.1:{telemetry.port}"))
        silent.sendall(sent)
        begin = time.monotonic()
        assert silent.recv(10) == b""
        assert time.monotonic() - begin < 30
    assert capfd.readouterr() == ("", "")


def test_a_client_that_does_not_read_its_answer_is_disconnected_without_a_word_in_the_log(
    health: Health, capfd: pytest.CaptureFixture[str]
) -> None:
    registry = CollectorRegistry()
    Gauge("gspo_test_large", "x" * (64 << 20), registry=registry)
    with ExitStack() as stack:
        telemetry = stack.enter_context(TelemetryServer("127.0.0.1", 0, registry, health, silent_s=0.3))
        deaf = stack.enter_context(connection_to(f"127.0.0.1:{telemetry.port}"))
        deaf.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert deaf.recv(1) == b"H"
        num_threads = threading.active_count()
        deadline = time.monotonic() + 60
        while threading.active_count() >= num_threads and time.monotonic() < deadline:
            time.sleep(0.05)
        assert threading.active_count() < num_threads, "its thread has ended"
    assert capfd.readouterr() == ("", "")


def test_a_request_without_end_is_refused(server: str) -> None:
    with connection_to(server) as endless:
        endless.sendall(b"GET /metrics HTTP/1.1\r\nX: " + b"y" * 70_000)
        assert b" 431 " in endless.recv(100)


def test_a_collector_that_raises_costs_the_page_and_is_logged(health: Health) -> None:
    class Broken(Collector):
        def describe(self) -> list[Metric]:
            return []

        def collect(self) -> list[Metric]:
            raise ValueError("no such sample")

    registry = CollectorRegistry()
    registry.register(Broken())
    with TelemetryServer("127.0.0.1", 0, registry, health) as telemetry, capture_logs() as logs:
        server = f"127.0.0.1:{telemetry.port}"
        assert ask(server, "/metrics").status == 500
        assert ask(server, "/healthz").status == 200
    assert [event["event"] for event in logs] == ["telemetry_failed"]
