"""An episode's journal: what whoever goes on with it must find again, and no token says.

An entry is plain data that only rollouts understand: a call that an agent made, or the result of a step that must not be
repeated. Entries are appended one by one and come back with the lease, as one array of bytes: msgpack, one entry after
another.
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Final

import msgpack
import numpy as np

from gspo_protocol import limits
from gspo_protocol.messages.base import Count, Message, Plain, require_plain

JOURNAL_ARRAYS: Final[dict[str, str]] = {"journal": "uint8"}


class Journal(Message, frozen=True, tag="journal"):
    """Rollout -> broker: an entry of the trajectory's journal; acknowledged once durable. Idempotent by (trajectory, epoch,
    place).
    """

    ARRAYS: ClassVar[dict[str, str]] = {}

    trajectory_id: Count
    epoch: Count
    place: Count
    """Entries before it."""
    entry: Plain

    def check_plain(self) -> None:
        require_plain("entry", self.entry, limits.MAX_ENTRY_BYTES)


def pack_entry(entry: Plain) -> bytes:
    """Pack an entry as it is kept and counted. Raises: ValueError, TypeError, OverflowError when it is not plain data."""
    packed: bytes = msgpack.packb(entry, use_bin_type=True)
    return packed


def journal_array(entries: Iterable[bytes]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the array of packed entries."""
    return {"journal": np.frombuffer(b"".join(entries), np.uint8)}


def entries_in(arrays: Mapping[str, np.ndarray[Any, Any]]) -> list[Plain]:
    """Return the entries of an array that ``check_journal`` has checked."""
    return list(_unpacker(arrays["journal"].tobytes()))


def check_journal(arrays: Mapping[str, np.ndarray[Any, Any]], num_entries: int) -> None:
    """Raises: ValueError when the array does not hold so many entries of plain data."""
    array = arrays["journal"]
    if array.ndim != 1 or len(array) > limits.MAX_JOURNAL_BYTES:
        raise ValueError(f"array journal has shape {array.shape}, {limits.MAX_JOURNAL_BYTES} bytes allowed")
    if not num_entries and not len(array):
        return
    unpacker = _unpacker(array.tobytes())
    found = end = 0
    try:
        for entry in unpacker:
            require_plain("journal", entry)
            found, end = found + 1, unpacker.tell()
    except (msgpack.UnpackException, ValueError, RecursionError) as error:
        raise ValueError(f"array journal: entry {found} cannot be read: {error}") from error
    if found != num_entries or end != len(array):
        raise ValueError(f"array journal holds {found} entries in {end} of {len(array)} bytes, num_entries is {num_entries}")


def _unpacker(data: bytes) -> Any:
    unpacker = msgpack.Unpacker(raw=False, max_buffer_size=limits.MAX_JOURNAL_BYTES)
    unpacker.feed(data)
    return unpacker
