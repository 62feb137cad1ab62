"""What the broker answers to a request, as the training loop gets it."""

from itertools import chain, repeat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_protocol.messages import BatchPartRequest, BatchRequest, EndOfRun, SkipBatch
from gspo_services.learner.broker.exchange import BatchExchange
from gspo_services.learner.broker.parts import CREDIT
from gspo_services.learner.broker.port import Answer, BatchAnnounced, PartArrived
from tests.support.broker.made_batches import in_parts

REQUEST = BatchRequest(index=4, policy_version=9)
END = EndOfRun(index=4, reason="stopped by operator: enough")
SKIP = SkipBatch(index=4, reason="it crashed twice")


def an_exchange(request: BatchRequest = REQUEST) -> BatchExchange:
    exchange = BatchExchange()
    exchange.want(request)
    return exchange


def test_a_batch_is_handed_over_once_and_as_it_is_and_few_parts_wait() -> None:
    made, exchange = in_parts(6), an_exchange()
    assert exchange.hear(made.batch, made.arrays) == BatchAnnounced(batch=made.batch, arrays=made.arrays)
    assert exchange.wanted is None
    assert exchange.hear(made.batch, made.arrays) is None, "the answer to a repetition of the request"
    answers = [exchange.hear(*part) for part in made.parts]
    assert answers[:CREDIT] == [PartArrived(part=part, arrays=arrays) for part, arrays in made.parts[:CREDIT]]
    assert answers[CREDIT:] == [None] * (6 - CREDIT)
    exchange.took()
    assert exchange.request_for_parts() == BatchPartRequest(index=4, part=CREDIT, count=1)


@pytest.mark.parametrize("answer", [END, SKIP], ids=["end", "skip"])
def test_what_comes_in_place_of_a_batch_is_handed_over_once(answer: EndOfRun | SkipBatch) -> None:
    exchange = an_exchange()
    assert exchange.hear(answer, {}) == answer
    assert exchange.hear(answer, {}) is None


def test_the_answer_to_another_request_is_none_to_this_one() -> None:
    exchange, made = an_exchange(), in_parts(2, index=3)
    for message, arrays in ((made.batch, made.arrays), made.parts[0], (SkipBatch(index=3, reason="late"), {})):
        assert exchange.hear(message, arrays) is None
    assert exchange.wanted == REQUEST


def test_of_a_batch_that_is_skipped_after_its_announcement_no_part_follows_and_none_is_asked_for() -> None:
    made, exchange = in_parts(8), an_exchange()
    exchange.hear(made.batch, made.arrays)
    exchange.hear(*made.parts[0])
    assert exchange.hear(SKIP, {}) == SKIP
    assert exchange.hear(SKIP, {}) is None
    assert [exchange.hear(*part) for part in made.parts] == [None] * 8
    exchange.took()
    exchange.ask_again()
    assert exchange.request_for_parts() is None


def test_a_batch_whose_last_part_has_come_is_not_skipped_any_more() -> None:
    made, exchange = in_parts(1), an_exchange()
    exchange.hear(made.batch, made.arrays)
    assert isinstance(exchange.hear(*made.parts[0]), PartArrived)
    assert exchange.hear(SKIP, {}) is None


def test_a_new_request_ends_what_the_former_one_brought() -> None:
    made, exchange = in_parts(8), an_exchange()
    exchange.hear(made.batch, made.arrays)
    exchange.want(BatchRequest(index=5, policy_version=10))
    assert exchange.hear(*made.parts[0]) is None
    assert exchange.request_for_parts() is None


def test_parts_are_asked_for_again_only_if_none_has_come_since_the_last_look() -> None:
    made, exchange = in_parts(8), an_exchange()
    exchange.hear(made.batch, made.arrays)
    first = exchange.request_for_parts()
    assert first == BatchPartRequest(index=4, part=1, count=CREDIT - 1)
    exchange.look()
    assert exchange.request_for_parts() is None
    exchange.hear(*made.parts[0])
    exchange.look()
    assert exchange.request_for_parts() is None, "a part has come"
    exchange.look()
    assert exchange.request_for_parts() == first


@settings(deadline=None)
@given(
    st.integers(1, 9),
    st.lists(st.sampled_from(["part", "part", "take"]), max_size=30),
    st.none() | st.integers(0, 30),
)
def test_whenever_parts_are_taken_and_the_batch_is_skipped_few_wait_and_they_come_in_order(
    num_parts: int, steps: list[str], skipped_after: int | None
) -> None:
    made, exchange = in_parts(num_parts), an_exchange()
    handed: list[Answer] = []
    num_taken = num_sent = 0
    exchange.hear(made.batch, made.arrays)
    # In the end all that is left is sent and taken.
    for number, step in enumerate(chain(steps, *repeat(["take", "part"], num_parts + CREDIT))):
        if number == skipped_after:
            skipped = exchange.hear(SKIP, {})
            assert (skipped is None) == (num_sent == num_parts)
            if skipped is not None:
                handed.append(skipped)
        if step == "take":
            if num_taken < len(handed) and isinstance(handed[num_taken], PartArrived):
                num_taken += 1
                exchange.took()
        elif num_sent < num_parts and (answer := exchange.hear(*made.parts[num_sent])) is not None:
            num_sent += 1
            handed.append(answer)
        assert len([each for each in handed if isinstance(each, PartArrived)]) - num_taken <= CREDIT
    parts = [PartArrived(part=part, arrays=arrays) for part, arrays in made.parts[:num_sent]]
    assert handed == (parts if num_sent == num_parts else [*parts, SKIP])
