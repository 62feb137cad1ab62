"""Any program may listen at a process's metrics port."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp
import pytest

from gspo_services.cli.doctor.observe import metrics_of, read_page


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


def test_samples_are_summed_over_their_labels() -> None:
    assert metrics_of('a_total{b="c"} 2\na_total{b="d"} 3\nx 1\n') == {"a_total": 5.0, "x": 1.0}
