"""Reliable delivery against a line that loses, repeats and reorders."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_protocol.delivery import Inbox, Outbox


def test_the_window_bounds_what_is_unacknowledged() -> None:
    outbox: Outbox[str] = Outbox(window=2, resend_s=1.0)
    outbox.push("a", now=0.0)
    outbox.push("b", now=0.0)
    assert not outbox.has_room
    with pytest.raises(ValueError, match="window of 2"):
        outbox.push("c", now=0.0)
    assert outbox.acknowledge(1, now=0.0) == ["a"]
    assert outbox.has_room


def test_nothing_is_due_while_acknowledgements_make_progress() -> None:
    outbox: Outbox[str] = Outbox(window=8, resend_s=1.0)
    outbox.push("a", now=0.0)
    outbox.push("b", now=0.9)
    assert outbox.due(0.99) == ()
    outbox.acknowledge(1, now=0.99)
    assert outbox.due(1.99) == ()


def test_what_is_not_acknowledged_is_sent_again_ever_less_often_up_to_a_bound() -> None:
    outbox: Outbox[str] = Outbox(window=8, resend_s=1.0)
    outbox.push("a", now=0.0)
    due = [tick / 4 for tick in range(80) if outbox.due(tick / 4)]
    assert due == [1.0, 3.0, 7.0, 11.0, 15.0, 19.0]


def test_a_late_acknowledgement_makes_the_sender_wait_longer_and_a_prompt_one_ends_that() -> None:
    outbox: Outbox[str] = Outbox(window=8, resend_s=1.0)
    outbox.push("a", now=0.0)
    assert outbox.acknowledge(1, now=0.9) == ["a"]
    outbox.push("b", now=10.0)
    assert outbox.due(11.7) == ()
    assert outbox.due(11.8) == ((1, "b"),)
    # Nobody knows which copy this answers, so it says nothing about the delay.
    assert outbox.acknowledge(2, now=11.9) == ["b"]
    outbox.push("c", now=20.0)
    assert outbox.due(23.5) == ()
    assert outbox.acknowledge(3, now=23.6) == ["c"]
    outbox.push("d", now=30.0)
    assert outbox.due(33.9) == ()
    assert outbox.acknowledge(4, now=33.9) == ["d"]
    outbox.push("e", now=40.0)
    assert outbox.acknowledge(5, now=40.1) == ["e"]
    outbox.push("f", now=50.0)
    assert outbox.due(51.0) == ((5, "f"),)


def test_a_reconnection_sends_everything_unacknowledged_again_in_order() -> None:
    outbox: Outbox[str] = Outbox(window=8, resend_s=1.0)
    for item in "abc":
        outbox.push(item, now=0.0)
    outbox.acknowledge(1, now=0.0)
    assert outbox.reconnected(0.1) == ((1, "b"), (2, "c"))
    assert outbox.first_seq == 1


def test_a_message_behind_a_gap_is_not_taken() -> None:
    inbox = Inbox(first_seq=3)
    assert not inbox.offer(4)
    assert inbox.offer(3)
    assert inbox.offer(4)
    assert not inbox.offer(3)


def test_nothing_is_acknowledged_before_it_is_durable() -> None:
    inbox = Inbox(first_seq=0)
    inbox.offer(0)
    assert inbox.next_seq == 0
    assert inbox.committed() == 1
    assert inbox.next_seq == 1


@given(
    st.lists(st.sampled_from(["send", "lose", "duplicate", "swap", "ack", "lose_ack", "reconnect", "crash"]), max_size=200)
)
def test_everything_arrives_once_and_in_order_whatever_the_line_does(weather: list[str]) -> None:
    outbox: Outbox[int] = Outbox(window=4, resend_s=1.0)
    inbox = Inbox(first_seq=0)
    taken: list[int] = []
    durable = 0
    line: list[tuple[int, int]] = []
    now, produced = 0.0, 0

    def arrive() -> None:
        nonlocal durable
        while line:
            seq, item = line.pop(0)
            if inbox.offer(seq):
                taken.append(item)
        inbox.committed()
        durable = len(taken)

    for event in weather:
        now += 0.4
        if event == "send" and outbox.has_room:
            line.append((outbox.push(produced, now), produced))
            produced += 1
        elif event == "lose" and line:
            line.pop()
        elif event == "duplicate" and line:
            line.append(line[0])
        elif event == "swap":
            line.reverse()
        elif event == "ack":
            arrive()
            outbox.acknowledge(inbox.next_seq, now)
        elif event == "lose_ack":
            arrive()
        elif event == "reconnect":
            line[:] = outbox.reconnected(now)
        elif event == "crash":
            # The receiver forgets what was not durable; the sender says what it expects to be acknowledged next.
            del taken[durable:]
            inbox = Inbox(first_seq=outbox.first_seq)
            del taken[outbox.first_seq :]
            durable = len(taken)
            line[:] = outbox.reconnected(now)
        line.extend(outbox.due(now))
    while outbox.num_unacked:
        now += 2.0
        line.extend(outbox.due(now))
        arrive()
        outbox.acknowledge(inbox.next_seq, now)
    assert taken == list(range(produced))


def test_a_receiver_skips_what_its_former_life_acknowledged() -> None:
    inbox = Inbox(first_seq=0)
    inbox.skip_to(6)
    assert inbox.next_seq == 6
    assert inbox.offer(6)
    inbox.skip_to(3)
    assert inbox.offer(7)


def test_bytes_bound_what_is_unacknowledged_and_one_message_may_be_larger() -> None:
    outbox: Outbox[str] = Outbox(window=8, resend_s=1.0, window_bytes=100)
    outbox.push("a", 0.0, 99)
    outbox.push("b", 0.0, 500)
    assert not outbox.has_room
    outbox.acknowledge(1, 0.0)
    assert not outbox.has_room
    outbox.acknowledge(2, 0.0)
    assert outbox.has_room
