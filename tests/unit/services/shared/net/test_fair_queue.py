"""What is received waits in bounded queues, one for each peer, and is taken in turn."""

import sys
from collections import Counter, defaultdict
from collections.abc import Hashable
from itertools import count
from random import Random
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_services.shared.net.fair_queue import FairQueue


def a_queue(*, max_messages: int = 100, max_bytes: int = 1000) -> FairQueue[str]:
    return FairQueue(max_messages=max_messages, max_bytes=max_bytes)


def offer(queue: FairQueue[str], item: str, num_bytes: int = 1, *, max_messages: int = 50, max_bytes: int = 500) -> bool:
    return queue.offer(item[0], item, num_bytes, max_messages=max_messages, max_bytes=max_bytes)


def taken(queue: FairQueue[str]) -> list[str]:
    return [queue.take() for _ in range(len(queue))]


def test_peers_are_taken_from_in_turn_and_each_in_its_own_order() -> None:
    queue = a_queue()
    for item in ("a1", "a2", "a3", "b1", "c1", "c2"):
        assert offer(queue, item)
    assert taken(queue) == ["a1", "b1", "c1", "a2", "c2", "a3"]
    with pytest.raises(IndexError):
        queue.take()


def test_what_a_peer_sends_above_its_credit_is_dropped_and_costs_no_other_peer_anything() -> None:
    queue = a_queue()
    assert [offer(queue, f"a{number}", max_messages=2) for number in range(4)] == [True, True, False, False]
    assert offer(queue, "b1", max_messages=2)
    assert taken(queue) == ["a0", "b1", "a1"]
    assert offer(queue, "a4", max_messages=2)


def test_bytes_above_the_credit_are_dropped_and_a_first_message_may_have_any_size() -> None:
    queue = a_queue()
    assert offer(queue, "a1", 600, max_bytes=500)
    assert not offer(queue, "a2", 1, max_bytes=500)
    assert queue.take() == "a1"
    assert offer(queue, "a3", 400, max_bytes=500)
    assert not offer(queue, "a4", 101, max_bytes=500)
    assert offer(queue, "a5", 100, max_bytes=500)


def test_when_everybody_together_has_too_much_the_peer_with_most_loses_its_last() -> None:
    queue = a_queue(max_messages=4)
    for item in ("a1", "a2", "a3", "b1"):
        assert offer(queue, item)
    assert offer(queue, "c1")
    assert not offer(queue, "a4")
    assert taken(queue) == ["a1", "b1", "c1", "a2"]


def test_bytes_of_everybody_are_bounded_too() -> None:
    queue = a_queue(max_bytes=1000)
    assert offer(queue, "a1", 400)
    assert offer(queue, "b1", 350)
    assert offer(queue, "b2", 100)
    assert offer(queue, "c1", 300)
    assert queue.num_bytes <= 1000
    assert taken(queue) == ["a1", "c1"] or taken(queue) == []


@given(st.lists(st.one_of(st.tuples(st.sampled_from("abc"), st.integers(0, 40)), st.none()), max_size=200))
def test_the_bounds_hold_and_every_peers_messages_stay_in_order(steps: list[tuple[str, int] | None]) -> None:
    queue: FairQueue[tuple[str, int, int]] = FairQueue(max_messages=12, max_bytes=160)
    sent: Counter[str] = Counter()
    last: dict[str, int] = defaultdict(lambda: -1)
    waiting = 0
    for step in steps:
        if step is None:
            if len(queue):
                peer, number, _ = queue.take()
                assert number > last[peer]
                last[peer] = number
        else:
            peer, num_bytes = step
            queue.offer(peer, (peer, sent[peer], num_bytes), num_bytes, max_messages=6, max_bytes=100)
            sent[peer] += 1
        waiting = len(queue)
        assert waiting <= 12
        assert queue.num_bytes <= 160
    while len(queue):
        peer, number, _ = queue.take()
        assert number > last[peer]
        last[peer] = number
    assert queue.num_bytes == 0


class Watched(FairQueue[int]):
    """Knows at each drop whether the peer that loses a message has most."""

    def _drop_last(self, peer: Hashable) -> Hashable:
        assert self._size(peer) == max(map(self._size, self._peers))
        return super()._drop_last(peer)


@given(st.randoms(use_true_random=False), st.sampled_from([60, 10**6]))
def test_it_is_always_a_peer_with_most_that_loses(random: Random, max_bytes: int) -> None:
    queue = Watched(max_messages=9, max_bytes=max_bytes)
    for _ in range(200):
        if random.random() < 0.7:
            queue.offer(random.randrange(6), 0, random.randrange(40), max_messages=6, max_bytes=100)
        elif len(queue):
            queue.take()


def calls_of_overload(peers: int) -> int:
    """Calls of Python functions for 2,000 messages that come to a full queue, of which every second one is taken."""
    queue: FairQueue[int] = FairQueue(max_messages=4 * peers, max_bytes=10**9)
    calls = count()

    def profile(_: FrameType, event: str, __: object) -> None:
        if event == "call":
            next(calls)

    for number in range(4 * peers):
        queue.offer(number % peers, number, 1, max_messages=100, max_bytes=10**6)
    sys.setprofile(profile)
    try:
        for number in range(2000):
            queue.offer(number % peers, number, 1, max_messages=100, max_bytes=10**6)
            if number % 2:
                queue.take()
    finally:
        sys.setprofile(None)
    return next(calls)


def test_the_work_for_a_message_that_is_too_much_does_not_grow_with_the_peers() -> None:
    assert calls_of_overload(400) < 2 * calls_of_overload(50)
