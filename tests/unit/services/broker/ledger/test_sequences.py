"""Trajectories of several sequences, whose tokens alternate: what is counted, and what must not be taken."""

from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gspo_protocol.codec import decode, encode
from gspo_protocol.errors import ProtocolError
from gspo_protocol.limits import MAX_SEQUENCES, TrajectoryLimits, trajectory_limits
from gspo_protocol.messages import Chunk, Finish, GroupSampling, Segment, VersionRun
from gspo_protocol.messages.pieces import Pieces
from gspo_services.broker.ledger.intake import Growth, TokenFacts, check_finish, grown_row, growth
from gspo_services.broker.rows import NO_TURN, TrajectoryRow, VersionRow
from tests.support.broker.made_batches import Made, groups_of, made_batch

NEWEST = VersionRow(policy_version=9, endpoint="tcp://w:1", digest="d", num_bytes=1, trained_batches=0, vocabulary=100)
NEW = TrajectoryRow(trajectory_id=1, group_id=1, status="leased", epoch=1, lease_version=2)


class Token(NamedTuple):
    kind: str
    turn: int
    sequence: int
    version: int


@st.composite
def trajectories(draw: st.DrawFn) -> list[Token]:
    """What an agent with sub-agents and parallel calls makes, token by token."""
    tokens: list[Token] = []
    under_way: list[int | None] = []
    num_turns = 0
    for _ in range(draw(st.integers(1, 14))):
        sequence = draw(st.integers(0, len(under_way)))
        if sequence == len(under_way):
            under_way.append(None)
            kind = "observation"
        else:
            kind = draw(st.sampled_from(["observation", "action"]))
        if kind == "action" and under_way[sequence] is None:
            under_way[sequence] = num_turns
            num_turns += 1
        turn = under_way[sequence] if kind == "action" else num_turns
        assert turn is not None
        if kind == "observation":
            under_way[sequence] = None
        for _ in range(draw(st.integers(1, 3))):
            version = draw(st.integers(2, 9)) if kind == "action" else -1
            tokens.append(Token(kind, turn, sequence, version))
    return tokens


def chunk_of(tokens: list[Token], row: TrajectoryRow, num_rewards: int) -> Chunk:
    segments = [
        Segment(kind, turn, len(list(run)), sequence)  # type: ignore[arg-type]
        for (kind, turn, sequence), run in groupby(tokens, key=lambda token: token[:3])
    ]
    return Chunk(
        trajectory_id=1,
        epoch=1,
        offset=row.num_tokens,
        num_tokens=len(tokens),
        segments=segments,
        version_runs=[VersionRun(version, len(list(run))) for version, run in groupby(token.version for token in tokens)],
        state={},
        turn_rewards=[0.5] * num_rewards,
    )


def states(tokens: list[Token]) -> tuple[tuple[int, int], ...]:
    """Each sequence's tokens and its turn under way, counted anew."""
    by_sequence: dict[int, list[Token]] = {}
    for token in tokens:
        by_sequence.setdefault(token.sequence, []).append(token)
    return tuple(
        (len(each), each[-1].turn if each[-1].kind == "action" else NO_TURN) for _, each in sorted(by_sequence.items())
    )


def num_completed(tokens: list[Token]) -> int:
    turns = {token.turn for token in tokens if token.kind == "action"}
    return len(turns) - sum(turn != NO_TURN for _, turn in states(tokens))


def grown(row: TrajectoryRow, sent: Chunk, *, limits: TrajectoryLimits | None = None, max_tokens: int = 99) -> Growth:
    limits = trajectory_limits(1) if limits is None else limits
    facts = TokenFacts(largest_token_id=9)
    return growth(row, sent, facts, newest=NEWEST, limits=limits, sampling=GroupSampling(1.0, 98, max_tokens, 99))


def appended(row: TrajectoryRow, sent: Chunk) -> TrajectoryRow:
    return grown_row(row, sent, grown(row, sent))


@given(tokens=trajectories(), data=st.data())
@settings(max_examples=200, deadline=None)
def test_whatever_it_is_cut_into_a_trajectory_counts_as_its_tokens_do(tokens: list[Token], data: st.DataObject) -> None:
    single = max(token.sequence for token in tokens) == 0
    if single:  # The versions of one engine do not go back.
        versions = iter(sorted(token.version for token in tokens if token.kind == "action"))
        tokens = [token._replace(version=next(versions)) if token.kind == "action" else token for token in tokens]
    else:
        begun = next(index for index, token in enumerate(tokens) if token.sequence)
        tokens = [
            token._replace(version=2) if i < begun and token.kind == "action" else token for i, token in enumerate(tokens)
        ]
    places = data.draw(st.sets(st.integers(1, len(tokens))))
    row = NEW
    for start, end in pairwise(sorted({0, len(tokens), *places})):
        new = num_completed(tokens[:end]) - num_completed(tokens[:start])
        row = appended(row, chunk_of(tokens[start:end], row, new))
    assert row.sequence_states == states(tokens)
    assert (row.sequences == ()) == single
    assert row.num_turns == len({token.turn for token in tokens if token.kind == "action"})
    assert row.num_segments == sum(1 for _ in groupby(token[:1] + token[2:3] for token in tokens))
    assert row.num_runs == sum(1 for _ in groupby(token.version for token in tokens))
    assert row.last_sequence == tokens[-1].sequence


BEGUN = replace(
    NEW, num_tokens=9, num_action_tokens=4, num_turns=2, num_segments=4, num_runs=4, last_version=3, last_sequence=1,
    sequences=((5, 0), (4, 1)), lease_version=2,
)  # fmt: skip
"""Two answers under way, turn 0 in sequence 0 and turn 1 in sequence 1."""


@pytest.mark.parametrize(
    ("segments", "fields", "reason"),
    [
        ([Segment("action", 0, 1, 3)], {}, r"segments\[0\] is of sequence 3, 2 is the next that can begin"),
        ([Segment("action", 2, 1, 2)], {}, r"segments\[0\]: the first token is an action: it must be an observation"),
        ([Segment("action", 1, 1, 0)], {}, "is an action of turn 1, 2 must follow"),
        ([Segment("action", 0, 1, 1)], {}, "is an action of turn 0, 2 must follow"),
        ([Segment("observation", 1, 1, 1)], {"turn_rewards": [0.0]}, "is an observation of turn 1, 2 must follow"),
        ([Segment("observation", 2, 1, 1)], {}, "0 turn_rewards for 1 turns that the chunk completes"),
        ([Segment("observation", 2, 1, 2)], {"turn_rewards": [0.0]}, "1 turn_rewards for 0 turns"),
        ([Segment("action", 0, 16, 0)], {}, r"21 tokens, 20 allowed \(sampling.max_tokens\)"),
    ],
)
def test_what_no_agent_can_have_done_is_named(segments: list[Segment], fields: dict[str, Any], reason: str) -> None:
    num = sum(segment.num_tokens for segment in segments)
    version = -1 if segments[0].kind == "observation" else 3
    sent = Chunk(
        trajectory_id=1,
        epoch=1,
        offset=9,
        num_tokens=num,
        segments=segments,
        version_runs=[VersionRun(version, num)],
        **fields,
    )
    with pytest.raises(ValueError, match=reason):
        grown(BEGUN, sent, max_tokens=20)


def test_all_sequences_together_have_a_limit_and_so_has_their_number() -> None:
    long = replace(BEGUN, num_tokens=95)
    sent = replace(chunk_of([Token("action", 0, 0, 3)] * 5, long, 0), offset=95)
    with pytest.raises(ValueError, match=r"100 tokens in all sequences, 99 allowed \(sampling.max_episode_tokens\)"):
        grown(long, sent)
    with pytest.raises(ValueError, match="3 turns, 2 allowed in a batch of this size"):
        grown(
            BEGUN,
            chunk_of([Token("observation", 2, 2, -1), Token("action", 2, 2, 3)], BEGUN, 0),
            limits=TrajectoryLimits(2, 99, 99),
        )


def test_a_message_names_no_sequence_that_a_trajectory_cannot_have() -> None:
    chunk, arrays = a_chunk(sequence=MAX_SEQUENCES - 1)
    assert decode(encode(chunk, arrays)).message == chunk
    for sequence in (-1, MAX_SEQUENCES):
        chunk, arrays = a_chunk(sequence=sequence)
        with pytest.raises(ProtocolError, match=r"Expected `int` (>|<)= (0|255)"):
            decode(encode(chunk, arrays))


def a_chunk(*, sequence: int) -> tuple[Chunk, dict[str, np.ndarray[Any, Any]]]:
    segments = [Segment("observation", 0, 1, sequence)]
    chunk = Chunk(
        trajectory_id=1, epoch=1, offset=0, num_tokens=1, segments=segments, version_runs=[VersionRun(-1, 1)], state={}
    )
    return chunk, {"token_ids": np.zeros(1, np.int32), "logprobs": np.zeros(1, np.float32)}


def test_of_answers_under_way_at_the_same_time_an_older_token_may_come_after_a_newer_one() -> None:
    after = appended(BEGUN, chunk_of([Token("action", 0, 0, 7)], BEGUN, 0))
    older = chunk_of([Token("action", 1, 1, 3)], after, 0)
    assert grown(after, older).oldest == 3
    with pytest.raises(ValueError, match="version 1 to action tokens: the lease's engine served 2 before"):
        grown(after, replace(older, version_runs=[VersionRun(1, 1)]))


FINISHED = Finish(trajectory_id=1, epoch=1, num_tokens=9, reason="done", turn_rewards=[0.0, 1.0], discarded_turns=[0])


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"discarded_turns": [2]}, r"discarded_turns is \[2\]: expected turns from 0 to 1, each once, in order"),
        ({"discarded_turns": [0, 0]}, "each once, in order"),
        ({"discarded_turns": [0, 1], "turn_rewards": [0.0, 0.0]}, "all 2 turns: there is nothing to train on"),
        ({"discarded_turns": [1]}, r"turn_rewards\[1\] is 1, and turn 1 is discarded: give it 0"),
    ],
)
def test_turns_that_an_episode_discards_must_exist_and_have_no_reward(fields: dict[str, Any], reason: str) -> None:
    check_finish(BEGUN, FINISHED)
    with pytest.raises(ValueError, match=reason):
        check_finish(BEGUN, replace(FINISHED, **fields))


def test_only_the_end_of_an_episode_says_what_is_discarded() -> None:
    with pytest.raises(ValueError, match=r"segments\[0\] is discarded"):
        Chunk(
            trajectory_id=1,
            epoch=1,
            offset=0,
            num_tokens=1,
            segments=[Segment("discarded", 0, 1)],
            version_runs=[VersionRun(3, 1)],
        )


def test_a_batch_says_which_segments_are_discarded_and_the_learner_trains_none_of_them() -> None:
    segments = [Segment("observation", 0, 2), Segment("action", 0, 1), Segment("observation", 1, 1), Segment("action", 1, 2)]
    runs = [VersionRun(-1, 2), VersionRun(3, 1), VersionRun(-1, 1), VersionRun(3, 2)]
    made = Made(
        trajectory_id=1, group_id=1, token_ids=np.arange(6, dtype="<i4"), logprobs=np.full(6, -0.5, dtype="<f4"),
        pieces=Pieces(segments, runs, [0.0, 1.0]), discarded_turns=(0,), cuts=(3,),
    )  # fmt: skip
    batch = made_batch([made], policy_version=3)
    assert batch.arrays["sequences"].tolist() == [[6, 2]]
    (group,) = groups_of(batch)
    sequence = group.sequences[0].loaded()
    assert sequence.action_mask.tolist() == [False, False, False, False, True, True]
    assert sequence.token_ids.tolist() == list(range(6))
