"""The kernel drops what paused hosts send to a listening socket, and nothing else."""

import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest

from gspo_services.shared.net.closed_door import MAX_HOSTS, keep_out
from tests.support.wire.closed_door import needs_closed_doors

pytestmark = needs_closed_doors
KNOCK_S = 0.2


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("0.0.0.0", 0), backlog=64) as made:
        yield made


def may_connect(listener: socket.socket, host: str) -> bool:
    """Whether a connection from ``host`` (of 127/8) is made at the first attempt."""
    address = ("127.0.0.1", listener.getsockname()[1])
    with suppress(TimeoutError), socket.create_connection(address, timeout=KNOCK_S, source_address=(host, 0)):
        return True
    return False


def test_only_the_hosts_named_last_are_kept_out(listener: socket.socket) -> None:
    hosts = ["127.0.0.2", "127.0.0.3", "127.0.0.4"]
    assert [may_connect(listener, host) for host in hosts] == [True, True, True]
    keep_out(listener.fileno(), hosts[:2])
    assert [may_connect(listener, host) for host in hosts] == [False, False, True]
    keep_out(listener.fileno(), hosts[1:2])
    assert [may_connect(listener, host) for host in hosts] == [True, False, True]
    keep_out(listener.fileno(), [])
    assert [may_connect(listener, host) for host in hosts] == [True, True, True]
    keep_out(listener.fileno(), [])


def test_an_open_connection_of_a_host_that_is_kept_out_goes_on(listener: socket.socket) -> None:
    with socket.create_connection(("127.0.0.1", listener.getsockname()[1]), source_address=("127.0.0.2", 0)) as client:
        accepted, _ = listener.accept()
        with accepted:
            keep_out(listener.fileno(), ["127.0.0.2"])
            assert not may_connect(listener, "127.0.0.2")
            client.sendall(b"still here")
            assert accepted.recv(64) == b"still here"


def test_a_host_that_was_kept_out_while_it_connected_gets_in_when_the_door_opens(listener: socket.socket) -> None:
    """The client's kernel knocks again after a second."""
    keep_out(listener.fileno(), ["127.0.0.2"])
    with socket.socket() as client:
        client.bind(("127.0.0.2", 0))
        client.settimeout(KNOCK_S)
        with pytest.raises(TimeoutError):
            client.connect(("127.0.0.1", listener.getsockname()[1]))
        keep_out(listener.fileno(), [])
        listener.settimeout(10)
        accepted, address = listener.accept()
        accepted.close()
        assert address[0] == "127.0.0.2"


def test_more_hosts_than_a_filter_takes_close_the_door_for_the_first_of_them(listener: socket.socket) -> None:
    hosts = [f"127.0.1.{number}" for number in range(1, MAX_HOSTS + 2)]
    keep_out(listener.fileno(), hosts)
    assert [may_connect(listener, host) for host in (hosts[0], hosts[-2], hosts[-1])] == [False, False, True]


def test_hosts_of_other_address_families_and_sockets_that_are_gone_do_no_harm(listener: socket.socket) -> None:
    keep_out(listener.fileno(), ["::1", "127.0.0.2", "fe80::1"])
    assert not may_connect(listener, "127.0.0.2")
    keep_out(listener.fileno(), ["::1"])
    assert may_connect(listener, "127.0.0.2")
    number = listener.fileno()
    listener.close()
    keep_out(number, ["127.0.0.2"])
