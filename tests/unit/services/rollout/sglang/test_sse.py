"""Server-sent events from an untidy network."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.rollout.sglang.sse import EventParser

PAYLOADS = st.lists(st.binary(max_size=30).filter(lambda data: not set(data) & set(b"\r\n")), max_size=8)


@given(payloads=PAYLOADS, cuts=st.lists(st.integers(0, 400), max_size=12), newline=st.sampled_from([b"\n", b"\r\n"]))
def test_events_do_not_depend_on_how_the_network_cuts_them(payloads: list[bytes], cuts: list[int], newline: bytes) -> None:
    stream = b"".join(b"data: " + payload + newline * 2 for payload in payloads)
    parser = EventParser()
    received: list[bytes] = []
    bounds = sorted({0, len(stream), *(min(cut, len(stream)) for cut in cuts)})
    for begin, end in pairwise(bounds):
        received += parser.feed(stream[begin:end])
    assert received == payloads
    assert parser.num_pending_bytes == 0


def test_comments_and_other_fields_are_skipped_and_data_lines_joined() -> None:
    parser = EventParser()
    assert parser.feed(b": ping\n\nevent: x\ndata: a\nid: 3\ndata:b\n\n\n\n") == [b"a\nb"]


def test_an_event_cut_off_by_the_end_of_the_stream_is_seen() -> None:
    parser = EventParser()
    assert parser.feed(b'data: {"half":') == []
    assert parser.num_pending_bytes == 14


@pytest.mark.parametrize("ended", [False, True])
def test_an_event_over_the_limit_is_refused_before_it_is_whole(ended: bool) -> None:
    parser = EventParser(max_event_bytes=100)
    parser.feed(b"data: " + b"x" * 90)
    with pytest.raises(ValueError, match="limit is 100"):
        parser.feed(b"y" * 10 + (b"\n\n" if ended else b""))
