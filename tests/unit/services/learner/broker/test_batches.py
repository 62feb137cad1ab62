"""A Batch message becomes the trainer's groups: a token that the engine did not sample never becomes an action."""

import msgspec
import numpy as np
import pytest

from protocol.messages import Batch, BatchItem, Segment, VersionRun
from protocol.messages.pieces import Pieces, piece_arrays
from services.learner.broker.batches import groups_of
from tests.support.builders import a_batch, batch_arrays, token_arrays

PIECES = Pieces(
    [Segment("observation", 0, 3), Segment("action", 0, 2), Segment("observation", 1, 1), Segment("action", 1, 1)],
    [VersionRun(-1, 3), VersionRun(4, 1), VersionRun(5, 1), VersionRun(-1, 1), VersionRun(5, 1)],
    [0.0, 1.0],
)
"""Three observation, two action, one observation, one action token."""


def an_item(trajectory_id: int, group_id: int) -> BatchItem:
    return BatchItem(trajectory_id, group_id, 7, 4, 5, 2, "done")


def test_groups_keep_their_order_members_rewards_and_tokens() -> None:
    items = [an_item(1, 20), an_item(2, 10), an_item(3, 20)]
    batch = Batch(index=0, policy_version=6, temperature=0.7, items=items)
    rewards = [[1.0, 0.5], [0.0, 0.0], [0.25, 0.0]]
    arrays = token_arrays(21) | piece_arrays([PIECES._replace(turn_rewards=each) for each in rewards])
    batch.check_arrays(arrays)
    groups = groups_of(batch, arrays)
    assert [group.group_id for group in groups] == ["20", "10"]
    assert groups[0].rewards.tolist() == [1.5, 0.25]
    assert [rewards.tolist() for rewards in groups[0].turn_rewards or ()] == [[1.0, 0.5], [0.25, 0.0]]
    first, third = groups[0].sequences
    assert first.token_ids.tolist() == arrays["token_ids"][:7].tolist()
    assert third.token_ids.tolist() == arrays["token_ids"][14:].tolist()
    assert groups[1].sequences[0].token_ids.tolist() == arrays["token_ids"][7:14].tolist()
    assert first.temperature == 0.7


def test_tokens_of_sequences_that_alternate_come_together_under_their_own_context() -> None:
    pieces = Pieces(
        [
            Segment("observation", 0, 2, 0), Segment("action", 0, 1, 0), Segment("observation", 1, 1, 1),
            Segment("action", 1, 1, 1), Segment("action", 0, 1, 0), Segment("action", 1, 1, 1),
            Segment("observation", 2, 1, 2),
        ],
        [VersionRun(-1, 2), VersionRun(4, 1), VersionRun(-1, 1), VersionRun(4, 1), VersionRun(5, 2), VersionRun(-1, 1)],
        [0.0, 1.0],
    )  # fmt: skip
    items = [BatchItem(1, 20, 8, 7, 6, 2, "done"), an_item(2, 20)]
    batch = Batch(index=0, policy_version=6, temperature=1.0, items=items)
    arrays = token_arrays(15) | piece_arrays([pieces, PIECES])
    arrays["token_ids"] = np.arange(15, dtype=np.int32)
    batch.check_arrays(arrays)
    (group,) = groups_of(batch, arrays)
    assert [sequence.token_ids.tolist() for sequence in group.sequences] == [[0, 1, 2, 5], [3, 4, 6], list(range(8, 15))]
    assert [sequence.action_mask.tolist() for sequence in group.sequences[:2]] == [
        [False, False, True, True],
        [False, True, True],
    ]
    assert [sequence.turn_ids.tolist() for sequence in group.sequences[:2]] == [[-1, -1, 0, 0], [-1, 1, 1]]
    assert [sequence.versions.tolist() for sequence in group.sequences[:2]] == [[-1, -1, 4, 5], [-1, 4, 5]]
    assert group.sequences_per_episode == (2, 1)
    assert group.rewards.tolist() == [1.0, 1.0]


def test_observations_are_masked_and_have_neither_version_turn_nor_logprob() -> None:
    batch = Batch(index=0, policy_version=6, temperature=1.0, items=[an_item(1, 1)])
    arrays = {"token_ids": np.arange(7, dtype=np.int32), "logprobs": np.full(7, -0.5, dtype=np.float32)}
    arrays |= piece_arrays([PIECES])
    (sequence,) = groups_of(batch, arrays)[0].sequences
    assert sequence.action_mask.tolist() == [False, False, False, True, True, False, True]
    assert sequence.behaviour_logprobs.tolist() == [0.0, 0.0, 0.0, -0.5, -0.5, 0.0, -0.5]
    assert sequence.versions.tolist() == [-1, -1, -1, 4, 5, -1, 5]
    assert sequence.turn_ids.tolist() == [-1, -1, -1, 0, 0, -1, 1]


def test_a_logprob_that_rounding_put_above_zero_can_be_trained_on() -> None:
    batch = Batch(index=0, policy_version=6, temperature=1.0, items=[an_item(1, 1)])
    arrays = {"token_ids": np.arange(7, dtype=np.int32), "logprobs": np.full(7, 1.2e-7, dtype=np.float32)}
    arrays |= piece_arrays([PIECES])
    arrays["logprobs"][4] = -0.5
    (sequence,) = groups_of(batch, arrays)[0].sequences
    assert sequence.behaviour_logprobs.tolist() == [0.0, 0.0, 0.0, 0.0, -0.5, 0.0, 0.0]


@pytest.mark.parametrize(("field", "array"), [("num_segments", "segments"), ("num_runs", "version_runs")])
def test_an_item_whose_parts_do_not_cover_its_tokens_is_named(field: str, array: str) -> None:
    batch = a_batch()
    first, second = batch.items
    short = msgspec.structs.replace(first, **{field: getattr(first, field) - 1})
    long = msgspec.structs.replace(second, **{field: getattr(second, field) + 1})
    with pytest.raises(ValueError, match=f"trajectory 7: {array} cover"):
        groups_of(msgspec.structs.replace(batch, items=[short, long]), batch_arrays())
