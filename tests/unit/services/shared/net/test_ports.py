"""A held port: nobody is given it, and whoever names it may listen on it."""

import asyncio
import socket
import struct

import pytest
from torch.distributed import TCPStore

from gspo_services.shared.net.ports import held_port

_IP_LOCAL_PORT_RANGE = 51
"""Linux 6.3 and newer; Python has no name for it."""


async def test_a_server_that_is_told_the_port_listens_on_it_while_it_is_held() -> None:
    with held_port("127.0.0.1") as port:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        async with await asyncio.start_server(lambda *_: None, "127.0.0.1", port):
            socket.create_connection(("127.0.0.1", port)).close()


def test_the_rendezvous_of_ranks_opens_on_a_held_port() -> None:
    with held_port("127.0.0.1") as port:
        store = TCPStore("127.0.0.1", port, world_size=1, is_master=True, wait_for_workers=False)
        store.set("key", "value")
        assert store.get("key") == b"value"


def test_the_kernel_gives_a_held_port_to_nobody() -> None:
    def given() -> int:
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # The kernel chooses from this range alone, in which there is only the port that is held.
            other.setsockopt(socket.IPPROTO_IP, _IP_LOCAL_PORT_RANGE, struct.pack("=HH", port, port))
            other.bind(("127.0.0.1", 0))
            return int(other.getsockname()[1])

    with held_port("127.0.0.1") as port:
        with pytest.raises(OSError, match="in use"):
            given()
    assert given() == port


def test_a_port_on_which_somebody_listens_is_refused() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(OSError, match="in use"),
        held_port("127.0.0.1", server.getsockname()[1]),
    ):
        pass
