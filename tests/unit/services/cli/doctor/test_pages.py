"""Any program may listen at a process's metrics port."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp
import pytest

from gspo_services.cli.doctor.observe import metrics_of, read_page
from tests.support.processes.ports import free_ports


@contextmanager
def server_that_says(answer: bytes) -> Iterator[str]:
    """A server that gives every client the same answer."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            for _ in range(2):
                try:
                    connection, _ = server.accept()
                except OSError:
                    return  # closed: the test is over
                with connection:
                    connection.recv(4096)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 16\r\n\r\n<p>It works</p>\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nx",
    ],
)
async def test_a_page_of_another_program_is_named_and_stops_nothing(answer: bytes) -> None:
    with server_that_says(answer) as url:
        async with aiohttp.ClientSession() as session:
            page = await read_page(session, url)
    assert page.ready is None
    assert page.text.startswith(f"{url} does not answer as a process of this run: ")


async def test_a_page_that_nobody_serves_is_said_in_a_few_words() -> None:
    (port,) = free_ports(1)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=1.0)) as session:
        page = await read_page(session, f"http://127.0.0.1:{port}")
        assert (page.text, page.nobody) == (f"nothing listens at http://127.0.0.1:{port}", True)
        everybody = await read_page(session, "http://255.255.255.255:1")
    assert (everybody.nobody, everybody.text.partition(": ")[0]) == (False, "http://255.255.255.255:1 cannot be reached")
    assert "ConnectionKey" not in everybody.text
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=0.2)) as session:
            page = await read_page(session, f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert (page.up, page.nobody, page.text.partition(" ")[2]) == (False, False, "has not answered for 3 s")


def test_samples_are_summed_over_their_labels() -> None:
    assert metrics_of('a_total{b="c"} 2\na_total{b="d"} 3\nx 1\n') == {"a_total": 5.0, "x": 1.0}
