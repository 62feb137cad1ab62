"""The journal in a lease: entries come out as they went in, and whatever else is refused."""

from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_protocol.codec import decode, encode
from gspo_protocol.errors import ProtocolError
from gspo_protocol.limits import MAX_ENTRY_BYTES, MAX_JOURNAL_BYTES, MAX_PLAIN_DEPTH
from gspo_protocol.messages import Journal
from gspo_protocol.messages.journal import check_journal, entries_in, journal_array, pack_entry

leaves = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text()
plain = st.recursive(
    leaves, lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(), each, max_size=3), max_leaves=8
)


@given(entries=st.lists(plain, max_size=5))
def test_entries_come_out_as_they_went_in(entries: list[Any]) -> None:
    arrays = journal_array(map(pack_entry, entries))
    check_journal(arrays, len(entries))
    assert entries_in(arrays) == entries


@given(data=st.binary(max_size=60), number=st.integers(0, 3))
def test_any_bytes_are_entries_or_refused(data: bytes, number: int) -> None:
    arrays = {"journal": np.frombuffer(data, np.uint8)}
    try:
        check_journal(arrays, number)
    except ValueError as error:
        assert "array journal" in str(error)
    else:
        assert len(entries_in(arrays)) == number


@pytest.mark.parametrize(
    ("data", "number", "reason"),
    [
        (pack_entry(1) + pack_entry(2), 1, "holds 2 entries in 2 of 2 bytes, num_entries is 1"),
        (pack_entry(7) + b"\x92\x01", 1, "holds 1 entries in 1 of 3 bytes"),
        (pack_entry("abc")[:-1], 1, "holds 0 entries in . of 3 bytes"),
        (msgpack.packb(b"raw"), 1, "entry 0 cannot be read: journal holds a bytes"),
        (b"\x91" * (MAX_PLAIN_DEPTH + 2) + b"\xc0", 1, "nested more than"),
        (b"\xc1", 1, "entry 0 cannot be read"),
        (bytes(MAX_JOURNAL_BYTES + 1), 1, "bytes allowed"),
    ],
)
def test_what_is_no_journal_is_named(data: bytes, number: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_journal({"journal": np.frombuffer(data, np.uint8)}, number)


def test_an_entry_that_is_too_large_is_refused() -> None:
    right = Journal(trajectory_id=1, epoch=1, place=0, entry={"text": "x" * (MAX_ENTRY_BYTES - 16)})
    assert decode(encode(right, {})).message == right
    wrong = Journal(trajectory_id=1, epoch=1, place=0, entry={"text": "x" * MAX_ENTRY_BYTES})
    with pytest.raises(ProtocolError, match=f"entry has .* bytes, {MAX_ENTRY_BYTES} allowed"):
        decode(encode(wrong, {}))
