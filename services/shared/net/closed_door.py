"""Keeps hosts from connecting to a listening socket, in the kernel: a connection broken off after it was accepted has
delivered megabytes by then. Linux only, and not every kernel lets an ordinary user do it.
"""

import ctypes
import os
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import IPv4Address, ip_address
from typing import Final

ATTACH_FILTER: Final = 26
DETACH_FILTER: Final = 27
SOURCE_ADDRESS: Final = 0xFFF00000 + 12
"""Offset of the sender's address in an IPv4 header, for a filter of a TCP socket (SKF_NET_OFF)."""
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
DROP, TAKE = 0, 0xFFFFFFFF
MAX_HOSTS: Final = 64


def keep_out(listener: int, hosts: Iterable[str]) -> bool:
    """Drop what ``hosts`` (IPv4) send to a listening TCP socket; none: everybody may connect again. Open connections are not
    touched. A client's kernel tries again after a second, and after two more.

    Returns False where the kernel does not let this user do it; a socket that is gone does no harm.
    """
    numbers = [int(address) for host in hosts if isinstance(address := ip_address(host), IPv4Address)][:MAX_HOSTS]
    with suppress(OSError), socket.socket(fileno=os.dup(listener)) as own:
        if not numbers:
            own.setsockopt(socket.SOL_SOCKET, DETACH_FILTER, 0)
            return True
        program = [struct.pack("=HBBI", LOAD, 0, 0, SOURCE_ADDRESS)]
        for number in numbers:
            program.append(struct.pack("=HBBI", JUMP_IF_EQUAL, 0, 1, number))
            program.append(struct.pack("=HBBI", RETURN, 0, 0, DROP))
        program.append(struct.pack("=HBBI", RETURN, 0, 0, TAKE))
        code = ctypes.create_string_buffer(b"".join(program))
        try:
            own.setsockopt(socket.SOL_SOCKET, ATTACH_FILTER, struct.pack("@HP", len(program), ctypes.addressof(code)))
        except PermissionError:
            return False
    return True
