"""Endpoints that a peer announces for others to connect to: checked before anybody hears of them."""

import re
from typing import Final

MAX_HOST_CHARS: Final = 253
"""A name in the DNS."""
MAX_PORT: Final = 65_535
MAX_PATH_BYTES: Final = 107
"""A Unix socket's path: struct sockaddr_un, less its final zero."""
SHOWN_CHARS: Final = 80
_TCP: Final = re.compile(
    r"tcp://(?P<host>[0-9A-Za-z](?:[0-9A-Za-z_.-]*[0-9A-Za-z])?|\[[0-9A-Fa-f:.]+(?:%[0-9A-Za-z_.-]+)?\]):(?P<port>[0-9]{1,5})"
)
_IPC: Final = re.compile(r"ipc://(?P<path>[!-~]+)")


def require_endpoint(field: str, endpoint: str) -> None:
    """Check that ``endpoint`` is one that a process can connect to: tcp://HOST:PORT or ipc://PATH.

    Raises: ValueError with the field, the value and what is expected. Whoever connected to such an endpoint would end with
    an error of its own.
    """
    tcp, ipc = _TCP.fullmatch(endpoint), _IPC.fullmatch(endpoint)
    if tcp is not None and len(tcp["host"]) <= MAX_HOST_CHARS and 1 <= int(tcp["port"]) <= MAX_PORT:
        return
    if ipc is not None and len(ipc["path"]) <= MAX_PATH_BYTES:
        return
    shown = endpoint if len(endpoint) <= SHOWN_CHARS else f"{endpoint[:SHOWN_CHARS]}... ({len(endpoint)} characters)"
    raise ValueError(
        f"{field} is {shown!r}: expected tcp://HOST:PORT (a host of at most {MAX_HOST_CHARS} characters, a port from 1 to "
        f"{MAX_PORT}) or ipc://PATH (at most {MAX_PATH_BYTES} bytes)"
    )
