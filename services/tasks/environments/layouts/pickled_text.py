"""Reads one text out of a pickle without unpickling, because a pickle may run any program.

LiveCodeBench packs its private tests as JSON -> pickle -> zlib -> base64.
"""

from __future__ import annotations

import pickletools
from typing import Final

_TEXT: Final = frozenset({"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE"})
_HARMLESS: Final = frozenset({"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"})
"""What stands around a text: version, length, and numbers under which it could be named again."""


def pickled_text(data: bytes) -> str:
    """The text that ``data`` is the pickle of. Raises: ValueError for any other pickle, and for what is none."""
    found: list[str] = []
    try:
        for opcode, argument, position in pickletools.genops(data):
            if opcode.name in _TEXT and isinstance(argument, str):
                found.append(argument)
            elif opcode.name not in _HARMLESS:
                raise ValueError(f"the pickle has {opcode.name} at byte {position}: expected one text and nothing else")
    except (IndexError, UnicodeDecodeError, OverflowError) as error:
        raise ValueError(f"it is not a pickle: {error}") from error
    if len(found) != 1:
        raise ValueError(f"the pickle has {len(found)} texts: expected one")
    return found[0]
