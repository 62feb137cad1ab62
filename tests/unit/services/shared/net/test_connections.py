"""Connections of which libzmq holds too much: whatever honest peers do is allowed, and what has no end is found."""

from dataclasses import dataclass, field
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from gspo_services.shared.net.connections import MAX_HELD_BYTES, SLACK_BYTES, Connections, Excess, InKernel, largest

KIB = 1024
FD = 7
MAX_UNFINISHED = 256 * KIB
MAX_HELD = 1024 * KIB


@dataclass
class Reader:
    num_drained: int = 0
    is_waiting: bool = False


def a_channel(*addresses: tuple[str, int]) -> Connections:
    """A channel with connections of the descriptors FD, FD + 1, ..."""
    made = Connections(channel="work", max_unfinished=MAX_UNFINISHED, max_held=MAX_HELD)
    for index, address in enumerate(addresses or [("10.0.0.1", 1)]):
        made.accepted(FD + index, address, 0.0)
    return made


@dataclass
class Line:
    """One connection: messages of given sizes on the wire, read and handed over as libzmq and its reader would."""

    sizes: list[int]
    channel: Connections = field(default_factory=a_channel)
    reader: Reader = field(default_factory=Reader)
    sent: int = 0
    unread: int = 0
    num_delivered: int = 0

    def look(self) -> list[Excess]:
        return self.channel.look({FD: InKernel(self.sent, self.unread)}, self.reader)

    def drain(self) -> None:
        """Hand over every message that was read whole."""
        ends = list(accumulate(self.sizes))
        while self.num_delivered < len(ends) and ends[self.num_delivered] <= self.sent - self.unread:
            self.channel.delivered(FD, self.sizes[self.num_delivered], b"peer", b"key")
            self.num_delivered += 1
        self.reader.num_drained += 1

    @property
    def outstanding(self) -> int:
        return self.sent - sum(self.sizes[: self.num_delivered])


STEPS = st.lists(st.tuples(st.sampled_from(["send", "read", "drain", "look"]), st.integers(0, 300 * KIB)), max_size=60)


@given(sizes=st.lists(st.integers(1, MAX_UNFINISHED), min_size=1, max_size=12), steps=STEPS)
def test_a_peer_within_its_credit_is_never_broken_off(sizes: list[int], steps: list[tuple[str, int]]) -> None:
    line = Line(sizes)
    for step, num_bytes in steps:
        if step == "send":
            more = min(num_bytes, sum(sizes) - line.sent, MAX_HELD - line.outstanding)
            line.sent, line.unread = line.sent + more, line.unread + more
        elif step == "read":
            line.unread = max(0, line.unread - num_bytes)
        elif step == "drain":
            line.drain()
        else:
            assert line.look() == []
        assert line.look() == []


@given(whole=st.lists(st.integers(1, MAX_UNFINISHED), max_size=4), piece=st.integers(16 * KIB, 100 * KIB))
def test_a_message_without_an_end_is_found_before_it_holds_much_more_than_a_message(whole: list[int], piece: int) -> None:
    endless = 100 * MAX_HELD
    line = Line([*whole, endless], sent=sum(whole))
    line.drain()
    found: list[Excess] = []
    while not found:
        line.sent += piece
        found = line.look()
        line.drain()
        assert line.outstanding <= MAX_UNFINISHED + SLACK_BYTES + 2 * piece
    assert found[0].reason == "a message without an end"
    assert found[0].connection is line.channel.by_fd[FD]


def test_a_message_without_an_end_is_only_found_once_everything_whole_was_handed_over() -> None:
    line = Line([100 * MAX_HELD], sent=MAX_UNFINISHED + SLACK_BYTES + 1)
    assert line.look() == []
    assert line.channel.has_suspects
    assert line.look() == [], "the reader has not looked since"
    line.drain()
    assert [excess.reason for excess in line.look()] == ["a message without an end"]
    assert not line.channel.has_suspects


def test_a_suspect_whose_messages_were_whole_is_cleared() -> None:
    line = Line([200 * KIB] * 4, sent=400 * KIB)
    assert line.look() == []
    assert line.channel.has_suspects
    line.drain()
    assert line.look() == []
    assert not line.channel.has_suspects


def test_many_whole_messages_beyond_the_credit_are_found_at_once() -> None:
    line = Line([KIB] * 2000, sent=MAX_HELD + SLACK_BYTES)
    assert line.look() == []
    line.sent += 1
    assert [excess.reason for excess in line.look()] == ["messages beyond its credit"]


def test_what_the_kernel_still_holds_is_not_held_by_libzmq() -> None:
    line = Line([100 * MAX_HELD], sent=3 * MAX_HELD, unread=3 * MAX_HELD)
    assert line.look() == []
    assert line.channel.by_fd[FD].held == 0
    line.unread = 0
    assert line.look() != []


def test_what_was_delivered_of_a_former_connection_does_not_count_for_the_next_one() -> None:
    line = Line([100 * MAX_HELD])
    line.channel.delivered(FD, 50 * MAX_HELD, b"former", b"")
    line.channel.accepted(FD, ("10.0.0.2", 2), 1.0)
    line.channel.delivered(FD, 50 * MAX_HELD, b"former", b"")  # Read late: nothing came over the new one yet.
    assert line.look() == []
    line.sent = MAX_HELD + SLACK_BYTES + 1
    assert [excess.connection.address for excess in line.look()] == [("10.0.0.2", 2)]


def test_who_sends_is_known_from_its_messages_and_a_closed_connection_is_forgotten() -> None:
    channel = a_channel()
    channel.delivered(FD, 10, b"rollout-0/s", b"k" * 40)
    channel.delivered(FD + 1, 10, b"unknown descriptor", b"")
    assert (channel.by_fd[FD].peer, channel.by_fd[FD].key, channel.by_fd[FD].delivered) == (b"rollout-0/s", b"k" * 40, 10)
    channel.closed(FD)
    channel.closed(FD)
    assert channel.by_fd == {}
    assert channel.look({FD: InKernel(100 * MAX_HELD, 0)}, Reader()) == []


def holding(channel: Connections, *held: int) -> Connections:
    for connection, num_bytes in zip(channel.by_fd.values(), held, strict=True):
        connection.held = num_bytes
    return channel


def test_all_connections_together_are_bounded_and_the_address_with_most_pays() -> None:
    """Many small connections of one host hold more than the one large connection of another."""
    third = MAX_HELD_BYTES // 3
    many = holding(a_channel(("10.0.0.1", 1), ("10.0.0.1", 2), ("10.0.0.1", 3)), third // 2, third // 2 + 2, third // 2)
    large = holding(a_channel(("10.0.0.2", 1)), third)
    assert largest([many, large]) is None
    large.by_fd[FD].held = MAX_HELD_BYTES - sum(each.held for each in many.by_fd.values())
    assert largest([many, large]) is None, "exactly as much as is allowed"
    more = holding(a_channel(("10.0.0.1", 4)), third)
    found = largest([many, large, more])
    assert found is not None
    assert found.connection is more.by_fd[FD]
    more.by_fd[FD].held = third // 2 + 1
    found = largest([many, large, more])
    assert found is not None
    assert found.connection.address == ("10.0.0.1", 2), "the largest of the address that holds most"


def test_connections_that_hold_next_to_nothing_are_not_counted_however_many_there_are() -> None:
    number = MAX_HELD_BYTES // SLACK_BYTES + 1
    channel = a_channel(*[("10.0.0.1", port) for port in range(number)])
    assert largest([holding(channel, *[SLACK_BYTES] * number)]) is None
    assert largest([holding(channel, *[SLACK_BYTES + 1] * number)]) is not None


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, MAX_HELD_BYTES)), max_size=12))
def test_breaking_the_largest_one_after_the_other_always_ends_below_the_bound(each: list[tuple[int, int]]) -> None:
    channel = a_channel(*[(f"10.0.0.{host}", port) for port, (host, _) in enumerate(each)]) if each else a_channel()
    connections = list(channel.by_fd.values())
    for connection, (_, held) in zip(connections, each, strict=False):
        connection.held = held
    while (found := largest([channel])) is not None:
        assert found.connection.held > SLACK_BYTES, "who holds next to nothing is not to blame"
        channel.closed(found.connection.fd)
    assert sum(rest.held for rest in channel.by_fd.values() if rest.held > SLACK_BYTES) <= MAX_HELD_BYTES
