"""What the only broker answers to a request, as the training loop gets it."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_protocol.messages import EndOfRun, SkipBatch
from gspo_services.learner.broker.batches import Answer, PartArrived
from gspo_services.learner.broker.one_connection import OneAnswer
from gspo_services.learner.broker.parts import CREDIT
from gspo_services.learner.several.merged_batch import MergedBatch
from tests.support.broker.made_batches import MadeBatch
from tests.support.shares.shares import a_share, announced

END = EndOfRun(index=4, reason="stopped by operator: enough")
SKIP = SkipBatch(index=4, reason="it crashed twice")


def parts_of(made: MadeBatch) -> list[Answer]:
    return [PartArrived(part=part, arrays=arrays) for part, arrays in made.parts]


def test_a_batch_is_handed_over_as_it_is_and_few_parts_wait() -> None:
    made, found = a_share(0, lengths=(2,) * 6), OneAnswer()
    first, parts = announced(made), parts_of(made)
    assert len(parts) > CREDIT
    for answer in (first, *parts):
        found.hear(answer)
    assert found.ready() == [first, *parts[:CREDIT]]
    assert found.ready() == []
    assert found.took()
    assert found.ready() == [parts[CREDIT]]


@pytest.mark.parametrize("answer", [END, SKIP], ids=["end", "skip"])
def test_what_comes_in_place_of_a_batch_is_handed_over_once(answer: Answer) -> None:
    found = OneAnswer()
    found.hear(answer)
    assert found.ready() == [answer]
    found.hear(answer)
    assert found.ready() == []


def test_of_a_batch_that_is_skipped_after_its_announcement_no_part_follows_and_none_is_asked_for() -> None:
    made, found = a_share(0, lengths=(2,) * 6), OneAnswer()
    for answer in (announced(made), *parts_of(made)):
        found.hear(answer)
    found.ready()
    found.hear(SKIP)
    assert found.ready() == [SKIP]
    assert [found.took() for _ in range(CREDIT + 1)] == [False] * (CREDIT + 1)


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=8),
    st.lists(st.sampled_from(["part", "part", "take"]), max_size=30),
    st.none() | st.integers(0, 30),
)
def test_one_broker_is_answered_like_several_of_which_there_is_one(
    lengths: list[int], steps: list[str], skipped_after: int | None
) -> None:
    made = a_share(0, lengths=tuple(lengths))
    one, several = OneAnswer(), MergedBatch(4, 1)
    coming = deque(parts_of(made))

    def hear(answer: Answer) -> None:
        one.hear(answer)
        several.hear(0, answer)
        assert one.ready() == several.ready()

    hear(announced(made))
    for number, step in enumerate(steps):
        if number == skipped_after:
            hear(SKIP)
            coming.clear()  # Its broker sends no more parts of it.
        if step == "take":
            assert one.took() == (several.took() is not None)
            assert one.ready() == several.ready()
        elif coming:
            hear(coming.popleft())
