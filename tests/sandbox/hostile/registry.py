"""Kinds of hostile programs, by their names."""

import random
from collections.abc import Callable
from typing import Final

SEEN: Final = "SEEN"
"""What a program prints that has found something of another sandbox or of the host."""
CANARY: Final = "gspo-canary"
"""The name of everything that the witness has: a file, a socket, a key, memory."""
HEAD: Final = """\
import ctypes, errno, os, resource, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
print = lambda *words: os.write(1, (" ".join(map(str, words)) + "\\n").encode())
def tried(call, *arguments):
    try:
        return call(*arguments)
    except (OSError, ValueError, MemoryError, AttributeError, TypeError):
        return None
"""
Kind = Callable[[random.Random], str]
KINDS: Final[dict[str, Kind]] = {}


def kind(write: Kind) -> Kind:
    """Register the function; its name is the kind's."""
    KINDS[write.__name__] = write
    return write
