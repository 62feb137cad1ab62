"""Holds a port between its choice and the moment in which another process listens on it."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_port(host: str, port: int = 0) -> Iterator[int]:
    """Let only programs that name the port have it inside the block. Yields the port; 0: any free port.

    A server that we start is told its port and binds it seconds later. Until then the kernel could give a port that was
    merely found free to any socket of the machine. It gives away none that is bound; and a socket that is bound, does not
    listen and allows reuse is in no one's way who asks for that port by number, and also allows reuse, as servers do.

    Raises: OSError when another process listens on the port, or the host is not an address of this machine.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((host, port))
        yield int(held.getsockname()[1])
