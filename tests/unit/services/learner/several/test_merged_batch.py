"""One request to several brokers: one stream of answers, whatever the order in which they come."""

from collections import deque
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gspo_protocol.messages import EndOfRun, SkipBatch, Trained
from gspo_services.learner.broker.batches import Answer, BatchAnnounced, PartArrived
from gspo_services.learner.broker.parts import CREDIT, PartStream
from gspo_services.learner.several.merged_batch import MergedBatch
from gspo_services.learner.several.shares import merged, merged_answers
from tests.support.broker.made_batches import MadeBatch
from tests.support.learner.scripted_broker import answers_of
from tests.support.shares.shares import a_share, announced, answers_of_shares

END = EndOfRun(index=4, reason="stopped by operator: enough")
SKIP = SkipBatch(index=4, reason="it crashed twice")
TRAINED = Trained(index=4, policy_version=9, metrics={"loss": 0.5, "num_tokens": 1.0})


def part_of(made: MadeBatch, number: int) -> PartArrived:
    part, arrays = made.parts[number]
    return PartArrived(part=part, arrays=arrays)


def an_answered_round(shares: list[MadeBatch]) -> MergedBatch:
    """The batch was handed over."""
    found = MergedBatch(4, len(shares))
    for broker, share in enumerate(shares):
        assert not found.ready()
        assert not found.hear(broker, announced(share))
    assert len(found.ready()) == 1
    return found


def test_nothing_is_announced_before_every_broker_has_answered() -> None:
    shares = [a_share(0), a_share(1)]
    found = MergedBatch(4, 2)
    assert not found.hear(1, announced(shares[1]))
    assert found.waits_for(0)
    assert not found.waits_for(1)
    assert found.ready() == []
    found.hear(0, announced(shares[0]))
    (whole,) = found.ready()
    assert isinstance(whole, BatchAnnounced)
    assert whole.batch == merged({0: announced(shares[0]), 1: announced(shares[1])}).batch


def test_parts_of_a_later_share_are_held_back_until_it_is_their_turn() -> None:
    shares = [a_share(0, lengths=(2,)), a_share(1, lengths=(2,))]
    found = an_answered_round(shares)
    for number in range(2):
        found.hear(1, part_of(shares[1], number))
        assert found.ready() == []
        assert found.next_broker == 0
    found.hear(0, part_of(shares[0], 0))
    assert [each.part.part for each in found.ready()] == [0]  # type: ignore[union-attr]
    found.hear(0, part_of(shares[0], 1))
    assert [each.part.part for each in found.ready()] == [1, 2]  # type: ignore[union-attr]
    assert found.took() == 0
    assert [each.part.part for each in found.ready()] == [3]  # type: ignore[union-attr]
    assert found.next_broker is None
    assert [found.took() for _ in range(4)] == [0, 1, 1, None]


class Line:
    """A broker and the stream of its parts, which come when they are asked for."""

    def __init__(self, made: MadeBatch) -> None:
        self.made = made
        self.on_its_way = deque([self.made.parts[0]])
        self.stream = PartStream(made.batch)
        self.ask()

    def begin_again(self) -> None:
        self.stream = PartStream(self.made.batch)
        self.stream.ask_again()
        self.ask()

    def ask(self) -> None:
        request = self.stream.request()
        if request is not None:
            self.on_its_way.extend(self.made.parts[request.part : request.part + request.count])

    def next_part(self) -> PartArrived | None:
        part, arrays = self.on_its_way.popleft()
        came = PartArrived(part=part, arrays=arrays) if self.stream.offer(part, arrays) else None
        self.ask()
        return came


class Course:
    """A batch on its way through lines that bring parts in any order, to a training thread that takes them at any time."""

    def __init__(self, lengths: list[list[int]]) -> None:
        self.shares = [a_share(broker, num_brokers=len(lengths), lengths=each) for broker, each in enumerate(lengths)]
        self.lines = [Line(share) for share in self.shares]
        self.round = an_answered_round(self.shares)
        self.waiting: deque[Answer] = deque()
        self.taken: list[Answer] = []
        self.gone: int | None = None

    def take(self) -> None:
        self.taken.append(self.waiting.popleft())
        if isinstance(self.taken[-1], PartArrived):
            broker = self.round.took()
            self.waiting.extend(self.round.ready())
            if broker is not None:
                self.lines[broker].stream.took()
                self.lines[broker].ask()

    def come(self, broker: int) -> None:
        part = self.lines[broker].next_part()
        if part is not None:
            self.round.hear(broker, part)
            self.waiting.extend(self.round.ready())

    def advance(self, what: str, broker: int) -> None:
        if what == "take" and self.waiting:
            self.take()
        elif what == "part" and self.lines[broker].on_its_way and broker != self.gone:
            self.come(broker)
        assert sum(isinstance(answer, PartArrived) for answer in self.waiting) <= CREDIT
        assert all(len(held) <= CREDIT for held in self.round._held)

    def quarantine(self, broker: int) -> None:
        """Unless all parts were handed over."""
        if self.round.next_broker is None:
            return
        self.gone = broker
        assert self.round.hear(broker, SKIP)
        for each, line in enumerate(self.lines):
            if each != broker:
                line.begin_again()
        self.waiting.extend(self.round.ready())

    def finish(self) -> None:
        while self.round.next_broker is not None or self.waiting:
            for broker in range(len(self.lines)):
                self.advance("part", broker)
                self.advance("take", broker)


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.tuples(st.sampled_from(["part", "take"]), st.integers(0, 3)), max_size=60),
    st.none() | st.integers(0, 3),
)
def test_whatever_comes_first_the_stream_is_that_of_the_shares_and_few_parts_wait(
    lengths: list[list[int]], steps: list[tuple[str, int]], unreadable: int | None
) -> None:
    """``unreadable``: the broker that quarantines its share in the end."""
    course = Course(lengths)
    for what, broker in steps:
        course.advance(what, broker % len(lengths))
    if unreadable is not None:
        course.quarantine(unreadable % len(lengths))
    course.finish()
    left = [answers_of(share) for broker, share in enumerate(course.shares) if broker != course.gone]
    expected = plain(list(merged_answers(left)) if left else [SKIP])
    again = [place for place, answer in enumerate(course.taken) if not isinstance(answer, PartArrived)]
    assert len(again) == (0 if course.gone is None else 1)
    if again:
        assert plain(course.taken[again[0] :]) == expected
    else:
        assert plain(course.taken) == expected[1:], "the announcement was taken by an_answered_round"


def plain(answers: Sequence[Answer]) -> list[object]:
    """Without arrays: a part's digest says what is in them."""
    return [
        answer.part if isinstance(answer, PartArrived) else answer.batch if isinstance(answer, BatchAnnounced) else answer
        for answer in answers
    ]


def test_a_share_that_was_quarantined_is_left_out() -> None:
    share = a_share(2)
    found = MergedBatch(4, 3)
    for broker, answer in ((0, SKIP), (2, announced(share)), (1, SKIP)):
        found.hear(broker, answer)
    assert found.ready() == [announced(share)]
    assert found.next_broker == 2


def test_a_batch_is_skipped_when_every_share_is() -> None:
    found = MergedBatch(4, 2)
    found.hear(0, SKIP)
    assert found.ready() == []
    found.hear(1, SKIP)
    assert found.ready() == [SKIP]
    assert found.ready() == []


def test_a_share_that_cannot_be_read_makes_the_batch_begin_again_without_it() -> None:
    shares = [a_share(0), a_share(1)]
    found = an_answered_round(shares)
    found.hear(0, part_of(shares[0], 0))
    found.hear(1, part_of(shares[1], 0))
    assert len(found.ready()) == 1
    assert found.hear(1, SKIP)
    assert found.ready() == [announced(shares[0])]
    assert found.took() is None, "the part that was handed over is of the former batch"
    found.hear(0, part_of(shares[0], 0))
    assert found.ready() == [part_of(shares[0], 0)]
    assert found.took() == 0
    assert found.hear(0, SKIP), "the last one"
    assert found.ready() == [SKIP]


def test_what_is_said_after_the_last_part_changes_nothing() -> None:
    shares = [a_share(0, lengths=(1,), part_tokens=99)] * 1
    found = an_answered_round(shares)
    found.hear(0, part_of(shares[0], 0))
    assert len(found.ready()) == 1
    assert not found.hear(0, SKIP)
    assert found.ready() == []
    assert found.took() == 0


def test_parts_that_were_handed_over_before_count_until_they_are_taken() -> None:
    shares = [a_share(0, lengths=(9,)), a_share(1, lengths=(9,))]
    found = an_answered_round(shares)
    for number in range(CREDIT):
        found.hear(0, part_of(shares[0], number))
    assert len(found.ready()) == CREDIT
    found.hear(1, SKIP)
    found.hear(0, part_of(shares[0], 0))
    assert found.ready() == [announced(shares[0])]
    assert found.took() is None
    assert found.ready() == [part_of(shares[0], 0)]


def test_an_end_waits_for_the_others_and_makes_void_what_they_have_answered() -> None:
    found = MergedBatch(4, 3)
    found.hear(0, announced(a_share(0)))
    found.hear(2, END)
    assert [found.waits_for(broker) for broker in range(3)] == [True, True, False]
    found.hear(1, replace(END, reason="stopped by learner"))
    assert found.ready() == []
    found.hear(0, EndOfRun(index=5, reason="stopped by learner"))
    assert found.ready() == [END], "the reason is the first one's"
    assert found.ready() == []


def test_each_broker_hears_whether_its_share_was_trained_and_what_all_shares_make() -> None:
    share = a_share(0)
    found = MergedBatch(4, 3)
    for broker, answer in enumerate((announced(share), SKIP, announced(a_share(2)))):
        found.hear(broker, answer)
    (whole,) = found.ready()
    assert isinstance(whole, BatchAnnounced)
    reports = found.reports(TRAINED)
    assert [report.skipped for report in reports] == [False, True, False]
    assert reports[0].metrics == {"loss": 0.5, **whole.batch.report}
    assert reports[0].metrics["num_tokens"] == whole.batch.num_tokens, "not what the trainer says"


def test_a_batch_that_all_have_quarantined_is_reported_as_it_is() -> None:
    found = MergedBatch(4, 2)
    for broker in range(2):
        found.hear(broker, SKIP)
    found.ready()
    skipped = Trained(index=4, policy_version=9, metrics={}, skipped=True)
    assert found.reports(skipped) == [skipped, skipped]


def test_shares_that_do_not_make_one_batch_are_refused() -> None:
    found = MergedBatch(4, 2)
    for broker in range(2):
        found.hear(broker, announced(a_share(0)))
    with pytest.raises(ValueError, match="both have group 0"):
        found.ready()


def test_the_stream_of_one_broker_is_passed_on() -> None:
    share = a_share(0)
    found = an_answered_round([share])
    for number in range(CREDIT):
        found.hear(0, part_of(share, number))
    handed = found.ready()
    assert handed == [part_of(share, number) for number in range(CREDIT)]
    assert answers_of_shares([share])[0][1:][: len(handed)] == handed
