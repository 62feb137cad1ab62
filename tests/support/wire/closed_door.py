"""Whether this kernel lets this user keep hosts from connecting: some let only root."""

import socket

import pytest

from gspo_services.shared.net.closed_door import keep_out


def may_close_doors() -> bool:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return keep_out(listener.fileno(), ["127.0.0.2"])


needs_closed_doors = pytest.mark.skipif(not may_close_doors(), reason="this kernel lets only root attach filters to sockets")
