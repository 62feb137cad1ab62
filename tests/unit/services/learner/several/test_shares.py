"""Of several brokers' shares one batch is made, which is trained as if one broker had all of it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace as replaced

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from structlog.testing import capture_logs

from gspo.model.packing import BatchGroup
from gspo_protocol.codec import decode, encode
from gspo_protocol.messages import EndOfRun, SkipBatch, TrainingValues
from gspo_services.learner.broker import Answer
from gspo_services.learner.broker.assembly import Assembly
from gspo_services.learner.broker.batches import BatchAnnounced, PartArrived
from gspo_services.learner.several.shares import (
    first_parts,
    merged,
    merged_answers,
    merged_report,
    merged_skip,
    versions_apart,
)
from tests.support.broker.made_batches import Made, all_rows, groups_of, made_batch
from tests.support.learner.scripted_broker import answers_of
from tests.support.shares.shares import a_share, a_trajectory_of, announced, answers_of_shares, with_report

SHARES = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=4)
"""Of each broker: the action tokens of its groups' trajectories."""


def described(group: BatchGroup) -> list[object]:
    sequences = [sequence.loaded() for sequence in group.sequences]
    return [
        group.group_id,
        group.rewards.tolist(),
        [(each.token_ids.tolist(), each.action_mask.tolist(), each.versions.tolist()) for each in sequences],
    ]


def trained(answers: Sequence[Answer]) -> list[list[object]]:
    """What the trainer gets."""
    first, *rest = answers
    assert isinstance(first, BatchAnnounced)
    assembly = Assembly(first.batch, first.arrays, all_rows)
    for arrived in rest:
        assert isinstance(arrived, PartArrived)
        assembly.add(arrived.part, arrived.arrays)
    return [described(group) for group in assembly.assembled().groups]


@settings(deadline=None, max_examples=60)
@given(SHARES, st.lists(st.integers(1, 30), min_size=4, max_size=4))
def test_however_a_batch_is_shared_and_cut_it_is_trained_as_if_one_broker_had_it(
    lengths: list[list[int]], part_tokens: list[int]
) -> None:
    number = len(lengths)
    shares = [
        a_share(broker, num_brokers=number, lengths=each, part_tokens=part_tokens[broker])
        for broker, each in enumerate(lengths)
    ]
    made: list[Made] = [
        a_trajectory_of(broker + number * place, member, length, float(member))
        for broker, each in enumerate(lengths)
        for place, length in enumerate(each)
        for member in range(2)
    ]
    whole = made_batch(made, index=4)
    answers = list(merged_answers(answers_of_shares(shares)))
    assert trained(answers) == [described(group) for group in groups_of(whole)]
    assert [each.part.part for each in answers if isinstance(each, PartArrived)] == list(range(len(answers) - 1))
    first = answers[0]
    assert isinstance(first, BatchAnnounced)
    assert decode(encode(first.batch, first.arrays)).message == first.batch, "it goes to the other ranks as a message"
    assert first.batch.report["num_tokens"] == whole.batch.num_tokens
    assert first.batch.report["lag/max"] == whole.batch.report["lag/max"]
    assert first.batch.report["train/reward"] == pytest.approx(whole.batch.report["train/reward"])


def test_a_share_without_roles_has_one() -> None:
    shares = [a_share(number, lengths=(2,)) for number in range(3)]
    roles = np.array([2, 1], np.uint8)
    shares[1] = replaced(shares[1], arrays={**shares[1].arrays, "turn_roles": roles})
    whole = merged({number: announced(share) for number, share in enumerate(shares)})
    assert whole.arrays["turn_roles"].tolist() == [0, 0, 2, 1, 0, 0]
    assert "turn_discarded" not in whole.arrays
    shares[2] = replaced(shares[2], arrays={**shares[2].arrays, "turn_discarded": np.array([1, 0], np.uint8)})
    whole = merged({number: announced(share) for number, share in enumerate(shares)})
    assert whole.arrays["turn_discarded"].tolist() == [0, 0, 0, 0, 1, 0]


def test_the_only_share_is_the_batch_itself() -> None:
    share = announced(a_share(0))
    assert merged({2: share}) is share
    answers = answers_of(a_share(0))
    assert all(one is other for one, other in zip(merged_answers([answers]), answers, strict=True))


def test_the_version_is_the_newest_of_the_shares() -> None:
    shares = {0: announced(a_share(0, policy_version=8)), 1: announced(a_share(1, policy_version=9))}
    whole = merged(shares).batch
    assert whole.policy_version == 9
    assert versions_apart(whole) == 1
    assert versions_apart(announced(a_share(0)).batch) == 0


def test_shares_assembled_before_and_after_a_change_of_schedules_are_trained_with_the_first_ones_values() -> None:
    """They are durable at the brokers: refused, they would end every learner of the run."""
    before, after = TrainingValues(learning_rate=0.25), TrainingValues(learning_rate=0.5)
    shares = {2: announced(a_share(2, values=after)), 1: announced(a_share(1, values=before))}
    with capture_logs() as logs:
        assert merged(shares).batch.values == before
    (told,) = logs
    assert (told["event"], told["batch"], told["trained_with"]) == ("scheduled_values_differ", 4, "broker 1")
    assert "learning_rate=0.25" in told["broker_1"]
    assert "learning_rate=0.5" in told["broker_2"]
    streams = [answers_of(a_share(number, values=each)) for number, each in enumerate((after, before))]
    replayed = next(iter(merged_answers(streams)))
    assert isinstance(replayed, BatchAnnounced)
    assert replayed.batch.values == after


def test_shares_of_different_batches_are_refused() -> None:
    with pytest.raises(ValueError, match=r"broker 1 gives a share of batch 5, and broker 0 one of batch 4"):
        merged({0: announced(a_share(0)), 1: announced(a_share(1, index=5))})


def test_a_group_that_two_brokers_have_is_named() -> None:
    with pytest.raises(ValueError, match="brokers 0 and 1 both have group 0 in batch 4"):
        merged({0: announced(a_share(0)), 1: announced(a_share(0))})


def test_the_first_part_of_a_share_follows_the_last_one_of_the_share_before() -> None:
    shares = {0: announced(a_share(0)), 2: announced(a_share(2, part_tokens=16)), 5: announced(a_share(1))}
    assert first_parts(shares) == {0: 0, 2: 4, 5: 5}


def test_no_part_is_read_before_its_turn() -> None:
    shares = [a_share(0), a_share(1)]
    read: list[int] = []

    def stream(broker: int) -> Iterator[Answer]:
        for answer in answers_of(shares[broker]):
            read.append(broker)
            yield answer

    answers = merged_answers([stream(0), stream(1)])
    next(answers)
    assert read == [0, 1]
    next(answers)
    assert read == [0, 1, 0]


def test_a_share_that_is_quarantined_is_left_out_and_all_of_them_skip_the_batch() -> None:
    skip = SkipBatch(index=4, reason="it crashed twice")
    left = a_share(1)
    assert list(merged_answers([[skip], answers_of(left)]))[0] == announced(left)  # noqa: RUF015
    assert list(merged_answers([[skip], [skip]])) == [skip]
    other = replace(skip, reason="a part cannot be read")
    assert merged_skip({0: skip, 2: other}).reason == "broker 0: it crashed twice; broker 2: a part cannot be read"


def test_the_first_end_ends_all() -> None:
    end = EndOfRun(index=4, reason="all are trained")
    assert list(merged_answers([answers_of(a_share(0)), [end]])) == [end]


def test_a_share_that_is_quarantined_after_its_announcement_is_refused_where_nothing_can_begin_again() -> None:
    answers = answers_of(a_share(1))
    with pytest.raises(ValueError, match="broker 1: SkipBatch"):
        list(merged_answers([answers_of(a_share(0)), [*answers[:2], SkipBatch(index=4, reason="damaged")]]))


def test_counts_add_up_maxima_are_the_largest_and_the_rest_are_means_over_trajectories() -> None:
    reports = [
        {"num_trajectories": 2, "num_tokens": 30, "lag/max": 3, "lag/mean": 1.0, "a/max_b": 5, "maxi/mean": 1.0, "e": 0.1},
        {"num_trajectories": 6, "num_tokens": 10, "lag/max": 2, "lag/mean": 2.0, "a/max_b": 9, "maxi/mean": 2.0, "e": 0.1},
    ]
    assert merged_report(reports) == {
        "num_trajectories": 8, "num_tokens": 40, "lag/max": 3, "lag/mean": 1.75, "a/max_b": 9, "maxi/mean": 1.75, "e": 0.1,
    }  # fmt: skip


def test_a_share_without_a_name_does_not_count_for_it() -> None:
    reports = [
        {"num_trajectories": 2, "pass_rate/new": None, "none": None},
        {"num_trajectories": 6, "pass_rate/new": 0.5},
        {"num_trajectories": 2, "pass_rate/new": 0.9, "only": 3.0},
    ]
    found = merged_report(reports)
    assert found["pass_rate/new"] == pytest.approx((6 * 0.5 + 2 * 0.9) / 8)
    assert found["only"] == 3.0
    assert "none" not in found


def test_without_numbers_of_trajectories_a_mean_is_that_of_the_shares() -> None:
    assert merged_report([{"a": 1.0}, {"a": 2.0}]) == {"a": 1.5}


def test_the_report_of_a_batch_is_that_of_its_shares() -> None:
    shares = {
        broker: announced(with_report(a_share(broker), num_tokens=10.0 + broker, num_trajectories=4.0)) for broker in (0, 1)
    }
    assert merged(shares).batch.report == {"num_tokens": 21.0, "num_trajectories": 8.0}


def test_arrays_are_end_to_end() -> None:
    shares = {0: announced(a_share(0, lengths=(3,))), 1: announced(a_share(1, lengths=(5, 2)))}
    whole = merged(shares)
    np.testing.assert_array_equal(whole.arrays["sequences"][:, 1], [3, 3, 5, 5, 2, 2])
    np.testing.assert_array_equal(whole.arrays["turn_rewards"], [0, 1, 0, 1, 0, 1])
