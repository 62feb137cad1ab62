"""The parts of a batch are taken once each, in order and whole, and never more than there is room for."""

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gspo_protocol.codec import Array
from gspo_protocol.messages import BatchPart, BatchPartRequest
from gspo_services.learner.broker.parts import CREDIT, MOST_DAMAGED, DamagedPart, PartStream
from tests.support.broker.made_batches import damaged, in_parts

Part = tuple[BatchPart, dict[str, Array]]


def test_the_first_part_comes_unasked_and_more_are_asked_for_as_room_is_made() -> None:
    made = in_parts(6)
    stream = PartStream(made.batch)
    assert stream.request() == BatchPartRequest(index=4, part=1, count=CREDIT - 1)
    assert stream.request() is None
    assert stream.offer(*made.parts[0])
    assert stream.request() is None, "nobody has taken it"
    stream.took()
    assert stream.request() == BatchPartRequest(index=4, part=CREDIT, count=1)


def test_a_batch_of_one_part_is_never_asked_for() -> None:
    made = in_parts(1)
    stream = PartStream(made.batch)
    assert stream.request() is None
    assert stream.offer(*made.parts[0])
    assert stream.complete
    stream.took()
    stream.ask_again()
    assert stream.request() is None


def test_what_came_before_is_behind_a_gap_or_is_of_another_batch_is_not_taken() -> None:
    made = in_parts(6)
    stream = PartStream(made.batch)
    assert stream.offer(*made.parts[0])
    for part in (made.parts[0], made.parts[2], in_parts(6, index=3).parts[1]):
        assert not stream.offer(*part)
    assert stream.next_part == 1


def test_parts_above_the_credit_are_not_taken_however_many_come() -> None:
    made = in_parts(6)
    stream = PartStream(made.batch)
    assert [stream.offer(*part) for part in made.parts] == [True] * CREDIT + [False] * (6 - CREDIT)
    stream.took()
    assert stream.request() == BatchPartRequest(index=4, part=CREDIT, count=1)
    assert stream.offer(*made.parts[CREDIT])


def test_after_a_reconnection_only_what_has_not_come_is_asked_for_again() -> None:
    made = in_parts(6)
    stream = PartStream(made.batch)
    stream.request()
    assert stream.offer(*made.parts[0])
    stream.ask_again()
    assert stream.request() == BatchPartRequest(index=4, part=1, count=CREDIT - 1)


@pytest.mark.parametrize("change", ["tokens", "digest", "length"])
def test_a_part_that_is_not_what_was_sent_is_asked_for_again_and_in_the_end_named(change: str) -> None:
    made = in_parts(3)
    message, arrays = made.parts[0]
    bad = {
        "tokens": damaged(made.parts[0]),
        "digest": (msgspec.structs.replace(message, digest="0" * 64), arrays),
        "length": (message, {name: array[:1] for name, array in arrays.items()}),
    }[change]
    stream = PartStream(made.batch)
    stream.request()
    for _ in range(MOST_DAMAGED - 1):
        assert not stream.offer(*bad)
        assert stream.request() == BatchPartRequest(index=4, part=0, count=CREDIT)
    with pytest.raises(DamagedPart, match=f"part 0 of batch 4 arrived damaged {MOST_DAMAGED} times in a row"):
        stream.offer(*bad)


def test_a_whole_copy_in_between_begins_the_count_again() -> None:
    made = in_parts(6)
    stream = PartStream(made.batch)
    for part in made.parts[:3]:
        for _ in range(MOST_DAMAGED - 1):
            assert not stream.offer(*damaged(part))
        assert stream.offer(*part)
        stream.took()


class Fetching(RuleBasedStateMachine):
    """A line that loses, repeats, damages and reorders what the broker sends on each request."""

    @initialize(num_parts=st.integers(1, 9))
    def begin(self, num_parts: int) -> None:
        self.made, self.older = in_parts(num_parts), in_parts(num_parts, index=3)
        self.stream = PartStream(self.made.batch)
        self.line: list[Part] = [self.made.parts[0], *self.older.parts]
        self.waiting: list[int] = []
        self.taken: list[int] = []
        self.ask()

    def ask(self) -> None:
        request = self.stream.request()
        if request is not None:
            self.line += self.made.parts[request.part : request.part + request.count]

    @precondition(lambda self: self.line)
    @rule(place=st.integers(0, 99), fate=st.sampled_from(["comes", "comes", "comes", "lost", "twice", "damaged"]))
    def deliver(self, place: int, fate: str) -> None:
        part = self.line.pop(place % len(self.line) if fate == "twice" else 0)
        if fate == "twice":
            self.line.append(part)
        if fate != "lost" and self.stream.offer(*(damaged(part) if fate == "damaged" else part)):
            assert fate != "damaged"
            self.waiting.append(int(part[1]["token_ids"][0]))
        self.ask()

    @precondition(lambda self: self.waiting)
    @rule()
    def take(self) -> None:
        self.taken.append(self.waiting.pop(0))
        self.stream.took()
        self.ask()

    @rule()
    def reconnect(self) -> None:
        self.line.clear()
        self.stream.ask_again()
        self.ask()

    @invariant()
    def once_each_and_in_order(self) -> None:
        if not hasattr(self, "made"):
            return
        assert self.taken + self.waiting == list(range(self.stream.next_part))
        assert len(self.waiting) <= CREDIT

    def teardown(self) -> None:
        """On a good line the rest comes."""
        if not hasattr(self, "made"):
            return
        for _ in range(3 * len(self.made.parts)):
            self.reconnect()
            while self.line:
                self.deliver(0, "comes")
            while self.waiting:
                self.take()
        assert self.stream.complete
        assert self.taken == list(range(len(self.made.parts)))


Fetching.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_whatever_the_line_does_every_part_is_taken_once_and_in_order = Fetching.TestCase
