"""A batch's parts become the trainer's groups: a token that the engine did not sample never becomes an action."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.model.packing import BatchGroup, BatchSequence
from gspo_protocol.codec import decode, encode
from gspo_protocol.limits import MAX_FRAME_BYTES
from gspo_protocol.messages import Batch, BatchItem, BatchPart, Segment, SkipBatch, VersionRun
from gspo_protocol.messages.experts import encode_experts
from gspo_protocol.messages.pieces import ACTION, Pieces
from gspo_services.learner.advantages import AdvantageSettings, sequences_with_advantages
from gspo_services.learner.broker import Answer
from gspo_services.learner.broker.assembly import AssembledBatch, Assembly, assemble
from tests.support.broker.ledger import SAMPLING
from tests.support.broker.made_batches import Made, all_rows, groups_of, made_batch
from tests.support.builders import token_arrays
from tests.support.learner.scripted_broker import answers_of

PIECES = Pieces(
    [Segment("observation", 0, 3), Segment("action", 0, 2), Segment("observation", 1, 1), Segment("action", 1, 1)],
    [VersionRun(-1, 3), VersionRun(4, 1), VersionRun(5, 1), VersionRun(-1, 1), VersionRun(5, 1)],
    [0.0, 1.0],
)
"""Three observation, two action, one observation, one action token."""
ALTERNATING = Pieces(
    [
        Segment("observation", 0, 2, 0), Segment("action", 0, 1, 0), Segment("observation", 1, 1, 1),
        Segment("action", 1, 1, 1), Segment("action", 0, 1, 0), Segment("action", 1, 1, 1),
        Segment("observation", 2, 1, 2),
    ],
    [VersionRun(-1, 2), VersionRun(4, 1), VersionRun(-1, 1), VersionRun(4, 1), VersionRun(5, 2), VersionRun(-1, 1)],
    [0.0, 1.0],
)  # fmt: skip
"""Three sequences, of which the last has no action."""


def a_trajectory(trajectory_id: int, group_id: int, pieces: Pieces = PIECES, logprob: float = -0.5) -> Made:
    num_tokens = sum(segment.num_tokens for segment in pieces.segments)
    return Made(
        trajectory_id=trajectory_id, group_id=group_id, token_ids=np.arange(num_tokens, dtype="<i4") + 100 * trajectory_id,
        logprobs=np.full(num_tokens, logprob, np.float32), pieces=pieces, cuts=(2, 5),
    )  # fmt: skip


def described(sequence: BatchSequence) -> list[list[object]]:
    loaded = sequence.loaded()
    arrays = loaded.token_ids, loaded.action_mask, loaded.behaviour_logprobs, loaded.versions, loaded.turn_ids
    return [array.tolist() for array in arrays]


def test_groups_keep_their_order_members_rewards_and_tokens() -> None:
    rewards = [[1.0, 0.5], [0.0, 0.0], [0.25, 0.0]]
    made = [
        a_trajectory(place + 1, group_id, PIECES._replace(turn_rewards=rewards[place]))
        for place, group_id in enumerate((20, 10, 20))
    ]
    groups = groups_of(made_batch(made, sampling=msgspec.structs.replace(SAMPLING, temperature=0.7)))
    assert [group.group_id for group in groups] == ["20", "10"]
    assert groups[0].rewards.tolist() == [1.5, 0.25]
    assert [rewards.tolist() for rewards in groups[0].turn_rewards or ()] == [[1.0, 0.5], [0.25, 0.0]]
    first, third = (sequence.loaded() for sequence in groups[0].sequences)
    assert first.token_ids.tolist() == list(range(100, 107))
    assert third.token_ids.tolist() == list(range(300, 307))
    assert groups[1].sequences[0].loaded().token_ids.tolist() == list(range(200, 207))
    assert first.temperature == 0.7


def test_a_sequence_has_the_adapter_that_sampled_it_and_one_that_is_not_trained_is_refused() -> None:
    made = [a_trajectory(1, 20), a_trajectory(2, 10, ALTERNATING)]
    batch = made_batch(made, sampling=msgspec.structs.replace(SAMPLING, adapter="words"))
    groups = groups_of(batch, ["sums", "words"])
    assert [group.adapter for group in groups] == [1, 1]
    assert {sequence.loaded().adapter for group in groups for sequence in group.sequences} == {1}
    assert {group.adapter for group in groups_of(made_batch(made))} == {0}
    for adapters, named in ((["sums", "verbs"], "sums, verbs"), ([], "none")):
        with pytest.raises(ValueError, match=rf"sampled with adapter 'words', and lora\.adapters are {named}: give broker"):
            groups_of(batch, adapters)
    with pytest.raises(ValueError, match=r"sampled with adapter '', and lora\.adapters are sums, words"):
        groups_of(made_batch(made), ["sums", "words"])


def test_a_role_is_compared_with_itself_and_its_sequences_have_its_advantage() -> None:
    outcomes = [[1.0, -1.0], [-1.0, 1.0]]
    made = [
        replace(a_trajectory(place, 20, ALTERNATING._replace(turn_rewards=rewards)), turn_roles=(0, 1))
        for place, rewards in enumerate(outcomes)
    ]
    batch = made_batch(made, part_tokens=4)
    received = decode([bytes(frame) for frame in encode(batch.batch, batch.arrays)])
    assert isinstance(received.message, Batch)
    assert received.arrays["turn_roles"].tolist() == [0, 1, 0, 1]
    (group,) = groups_of(batch)
    assert [roles.tolist() for roles in group.turn_roles or ()] == [[0, 1], [0, 1]]
    for advantage, signs in (("role", [1, -1, -1, 1]), ("turn", [1, -1, -1, 1]), ("sequence", [0, 0, 0, 0])):
        trained, _ = sequences_with_advantages([group], AdvantageSettings(advantage=advantage))  # type: ignore[arg-type]
        values = [sequence.advantages[sequence.action_mask] for sequence in trained if sequence.advantages is not None]
        assert [set(np.sign(each).tolist()) for each in values] == [{sign} for sign in signs], advantage


def test_the_turns_of_an_attempt_that_began_again_are_known_to_the_learner() -> None:
    made = [replace(a_trajectory(0, 20, ALTERNATING), discarded_turns=(0,)), a_trajectory(1, 20, ALTERNATING)]
    batch = made_batch(made, part_tokens=4)
    received = decode([bytes(frame) for frame in encode(batch.batch, batch.arrays)])
    assert received.arrays["turn_discarded"].tolist() == [1, 0, 0, 0]
    (group,) = groups_of(batch)
    assert [turns.tolist() for turns in group.turn_discarded or ()] == [[True, False], [False, False]]
    (without,) = groups_of(made_batch([a_trajectory(0, 20, ALTERNATING)]))
    assert without.turn_discarded is None
    for wrong in (np.array([2, 0, 0, 0], np.uint8), np.array([1], np.uint8)):
        with pytest.raises(ValueError, match="array turn_discarded is not 0 or 1 for each of turn_rewards"):
            batch.batch.check_arrays({**batch.arrays, "turn_discarded": wrong})


def test_tokens_of_sequences_that_alternate_come_together_under_their_own_context() -> None:
    (group,) = groups_of(made_batch([a_trajectory(0, 20, ALTERNATING), a_trajectory(1, 20)], part_tokens=4))
    sequences = [sequence.loaded() for sequence in group.sequences]
    assert [sequence.token_ids.tolist() for sequence in sequences] == [[0, 1, 2, 5], [3, 4, 6], list(range(100, 107))]
    assert [sequence.action_mask.tolist() for sequence in sequences[:2]] == [[False, False, True, True], [False, True, True]]
    assert [sequence.turn_ids.tolist() for sequence in sequences[:2]] == [[-1, -1, 0, 0], [-1, 1, 1]]
    assert [sequence.versions.tolist() for sequence in sequences[:2]] == [[-1, -1, 4, 5], [-1, 4, 5]]
    assert [sequence.num_action_tokens for sequence in group.sequences] == [2, 2, 3]
    assert group.sequences_per_episode == (2, 1)
    assert group.rewards.tolist() == [1.0, 1.0]


def test_observations_are_masked_and_have_neither_version_turn_nor_logprob() -> None:
    (group,) = groups_of(made_batch([a_trajectory(0, 1)]))
    assert described(group.sequences[0])[1:] == [
        [False, False, False, True, True, False, True],
        [0.0, 0.0, 0.0, -0.5, -0.5, 0.0, -0.5],
        [-1, -1, -1, 4, 5, -1, 5],
        [-1, -1, -1, 0, 0, -1, 1],
    ]


def test_a_logprob_that_rounding_put_above_zero_can_be_trained_on() -> None:
    (group,) = groups_of(made_batch([a_trajectory(0, 1, logprob=1.2e-7)]))
    assert group.sequences[0].loaded().behaviour_logprobs.tolist() == [0.0] * 7


@given(st.integers(1, 40), st.sets(st.integers(0, 5)))
def test_wherever_a_batch_is_cut_a_rank_has_its_own_sequences_and_the_lengths_of_the_others(
    part_tokens: int, own: set[int]
) -> None:
    made = [a_trajectory(0, 1), a_trajectory(1, 2, ALTERNATING), a_trajectory(2, 1), a_trajectory(3, 2)]
    whole = [sequence for group in groups_of(made_batch(made)) for sequence in group.sequences]
    cut = made_batch(made, part_tokens=part_tokens)
    assert len(cut.parts) == -(-29 // part_tokens)
    assembly = Assembly(cut.batch, cut.arrays, lambda groups, version: frozenset(own))
    for part, arrays in cut.parts:
        assert not assembly.complete
        assembly.add(part, arrays)
    found = [sequence for group in assembly.assembled().groups for sequence in group.sequences]
    assert len(found) == len(whole) == 6 - 1
    for row, (sequence, expected) in enumerate(zip(found, whole, strict=True)):
        assert sequence.num_tokens == expected.num_tokens
        assert sequence.num_action_tokens == expected.num_action_tokens
        assert sequence.oldest_version == expected.oldest_version == 4
        if row in own:
            assert described(sequence) == described(expected)
        else:
            with pytest.raises(ValueError, match="is trained by another rank"):
                sequence.loaded()


@given(st.integers(1, 40), st.sets(st.integers(0, 2)))
def test_wherever_a_batch_is_cut_each_action_token_has_the_experts_that_sampled_it(
    part_tokens: int, without: set[int]
) -> None:
    """Also where sequences alternate, a turn is discarded, and some chunks came without experts."""
    rows = encode_experts(np.arange(24).reshape(4, 2, 3), 300)
    made = [
        replace(a_trajectory(0, 1), experts=rows[:3], chunks_without_experts=tuple(without)),
        replace(a_trajectory(1, 1, ALTERNATING), experts=rows),
        replace(a_trajectory(2, 1), experts=rows[:3], discarded_turns=(0,)),
        a_trajectory(3, 1),
    ]
    (group,) = groups_of(made_batch(made, part_tokens=part_tokens, with_experts=True))
    first = np.array([0, 6, 12])
    first[[place - 1 in without for place in (2, 2, 3)]] = -1  # its tokens are in chunks 1, 1 and 2
    expected = [first.tolist(), [0, 12], [6, 18], [12], [-1, -1, -1]]
    for sequence, experts in zip(group.sequences, expected, strict=True):
        loaded = sequence.loaded()
        if loaded.experts is None:  # Parts that hold no experts at all.
            assert set(experts) == {-1}
        else:
            assert loaded.experts[:, 0, 0].tolist() == experts
            assert loaded.experts.shape == (loaded.num_action_tokens, 2, 3)


def test_a_batch_for_a_learner_that_asks_for_no_experts_has_none() -> None:
    with_rows = replace(a_trajectory(0, 1), experts=encode_experts(np.zeros((3, 2, 3), np.int32), 4))
    plain = made_batch([a_trajectory(0, 1)])
    assert [part for part, _ in made_batch([with_rows]).parts] == [part for part, _ in plain.parts]


def test_parts_with_experts_fit_a_frame_whatever_the_model() -> None:
    row = np.zeros((3, 512, 2), np.int32)
    made = made_batch([replace(a_trajectory(0, 1), experts=encode_experts(row, 4))], with_experts=True)
    assert made.batch.part_tokens * row[0].size == MAX_FRAME_BYTES


def test_what_decides_who_trains_what_is_known_before_the_tokens() -> None:
    made = made_batch([a_trajectory(0, 1), a_trajectory(1, 2, ALTERNATING), a_trajectory(2, 1)], policy_version=6)
    asked = []

    def rows_of(groups: Sequence[BatchGroup], version: int) -> frozenset[int]:
        outlines = [[(each.num_tokens, each.oldest_version) for each in group.sequences] for group in groups]
        asked.append((outlines, [group.group_id for group in groups], version))
        return frozenset()

    Assembly(made.batch, made.arrays, rows_of)
    assert asked == [([[(7, 4), (7, 4)], [(4, 4), (3, 4)]], ["1", "2"], 6)]


def test_a_part_out_of_turn_or_of_another_batch_is_refused() -> None:
    made = made_batch([a_trajectory(0, 1), a_trajectory(1, 1)], part_tokens=5)
    assembly = Assembly(made.batch, made.arrays, all_rows)
    (first, arrays), (second, more), (last, _) = made.parts
    too_long = {name: np.concatenate([array, array[-1:]]) for name, array in arrays.items()}
    for part in (second, msgspec.structs.replace(first, index=7)):
        with pytest.raises(
            ValueError, match=f"part {part.part} of batch {part.index} with 5 tokens, next is part 0 of batch 0"
        ):
            assembly.add(part, arrays)
    with pytest.raises(ValueError, match="part 0 of batch 0 with 6 tokens, next is part 0 of batch 0 with 5"):
        assembly.add(first, too_long)
    assembly.add(first, arrays)
    with pytest.raises(ValueError, match="part 0 of batch 0 with 5 tokens, next is part 1"):
        assembly.add(first, arrays)
    with pytest.raises(ValueError, match="batch 0 lacks its parts from 1 on"):
        assembly.assembled()
    assembly.add(second, more)
    with pytest.raises(ValueError, match="part 2 of batch 0 with 5 tokens, next is part 2 of batch 0 with 4"):
        assembly.add(last, arrays)


def test_a_trajectory_that_is_not_what_was_announced_is_named() -> None:
    made = made_batch([a_trajectory(3, 1)])
    wrong = {**made.arrays, "sequences": np.array([[7, 2]], np.int32)}
    assembly = Assembly(made.batch, wrong, all_rows)
    with pytest.raises(ValueError, match=r"trajectory 3: its sequences have \[\(7, 3\)\] .*, announced were \[\(7, 2\)\]"):
        assembly.add(*made.parts[0])


def test_a_group_that_cannot_be_trained_is_refused_before_its_tokens_come() -> None:
    untrained = replace(a_trajectory(1, 1, ALTERNATING), discarded_turns=(0, 1))
    made = made_batch([untrained])
    with pytest.raises(ValueError, match="group 1 has no sequences"):
        Assembly(made.batch, made.arrays, all_rows)


def assembled_from(answers: list[Answer | None]) -> tuple[object, list[int]]:
    """What ``assemble`` makes of these arrivals, and the batches during whose handling it might have raised."""
    watched = []

    @contextmanager
    def watching(index: int) -> Iterator[None]:
        watched.append(index)
        yield

    announced = answers[0]
    rest = iter(answers[1:])
    return assemble(announced, all_rows, lambda: next(rest), watching), watched  # type: ignore[arg-type]


def test_a_batch_is_assembled_from_what_arrives() -> None:
    answers = answers_of(made_batch([a_trajectory(0, 1)], index=4, part_tokens=3))
    found, watched = assembled_from([*answers])
    assert isinstance(found, AssembledBatch)
    assert described(found.groups[0].sequences[0]) == described(groups_of(made_batch([a_trajectory(0, 1)]))[0].sequences[0])
    assert set(watched) == {4}


@pytest.mark.parametrize("instead", [SkipBatch(index=4, reason="a part of it cannot be read"), None])
def test_what_comes_in_place_of_a_part_ends_the_batch(instead: SkipBatch | None) -> None:
    answers = answers_of(made_batch([a_trajectory(0, 1)], index=4, part_tokens=3))
    found, _ = assembled_from([*answers[:2], instead])
    assert found == instead


def test_a_row_that_covers_the_end_of_one_trajectory_and_the_beginning_of_the_next_belongs_to_both() -> None:
    items = [BatchItem(place, 1, 3, 1, 1, 4, "done", 1.0, 64) for place in range(2)]
    batch = Batch(index=0, policy_version=5, part_tokens=6, items=items)
    arrays = {"turn_rewards": np.zeros(2), "sequences": np.array([[3, 3], [3, 3]], np.int32)}
    spans = {"segments": np.array([[ACTION, 0, 0, 6]], np.int32), "version_runs": np.array([[4, 6]], np.int64)}
    assembly = Assembly(batch, arrays, all_rows)
    assembly.add(BatchPart(index=0, part=0, digest="d"), {**token_arrays(6), **spans})
    (group,) = assembly.assembled().groups
    assert [sequence.num_action_tokens for sequence in group.sequences] == [3, 3]
