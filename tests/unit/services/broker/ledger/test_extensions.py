"""Usual chunks are counted in columns: for many trajectories at once, as they would be one after the other."""

import random

import numpy as np
import pytest
from msgspec.structs import replace

from gspo_protocol.limits import MAX_VOCABULARY, TrajectoryLimits
from gspo_protocol.messages import Chunk, Segment, VersionRun
from gspo_protocol.messages.gathered import Gathered, gather
from gspo_services.broker.ledger.extensions import MOST_BEHIND, Extensions, Taken
from gspo_services.broker.ledger.intake import TokenFacts, grown_row, growth
from gspo_services.broker.rows import TrajectoryRow, VersionRow
from tests.support.broker.ledger import SAMPLING

LIMITS = TrajectoryLimits(turns=9, segments=9, runs=6)
NEWEST = VersionRow(policy_version=9, endpoint="", digest="", num_bytes=0, trained_batches=0, vocabulary=MAX_VOCABULARY)
MINE = ("rollout-a", "s")


def a_row(trajectory_id: int, **fields: object) -> TrajectoryRow:
    """Leased, with a prompt of one token and an action of three."""
    row = TrajectoryRow(
        trajectory_id=trajectory_id, group_id=0, status="leased", epoch=1, holder_peer=MINE[0], holder_session=MINE[1],
        lease_version=2, num_tokens=4, num_action_tokens=3, version_sum=6, min_version=2, num_turns=1, num_segments=2,
        num_runs=2, last_version=2,
    )  # fmt: skip
    return replace(row, **fields)


def a_chunk(row: TrajectoryRow, size: int, version: int, **fields: object) -> Chunk:
    made = Chunk(
        trajectory_id=row.trajectory_id,
        epoch=1,
        offset=row.num_tokens,
        num_tokens=size,
        segments=[Segment("action", 0, size)],
        version_runs=[VersionRun(version, size)],
    )
    return replace(made, **fields)


def take(extensions: Extensions, chunks: list[Chunk], *, holder: tuple[str, str] = MINE, largest: int = 5) -> Taken:
    arrays = [{"token_ids": np.full(each.num_tokens, largest, np.int32)} for each in chunks]
    for each in arrays:
        each["logprobs"] = np.zeros(len(each["token_ids"]), np.float32)
    _, gathered = gather(list(zip(chunks, arrays, strict=True)))
    return extensions.take(holder, Gathered(gathered).stretch_columns, NEWEST, lambda _: None)


def begun(rows: list[TrajectoryRow]) -> Extensions:
    extensions = Extensions()
    for row in rows:
        extensions.begin(row, limits=LIMITS, sampling=SAMPLING)
    return extensions


def test_many_trajectories_grow_as_one_after_the_other_would() -> None:
    rng = random.Random(7)
    rows = {number: a_row(number) for number in range(80)}  # More than there are slots at first.
    extensions = begun(list(rows.values()))
    refused = behind = 0
    num_behind = dict.fromkeys(rows, 0)
    for _ in range(40):
        some = [rows[number] for number in rng.sample(sorted(rows), 60)]
        sent = [a_chunk(row, rng.randint(1, 2), row.last_version + rng.choice((0, 0, 0, 0, 0, 1, -1))) for row in some]
        taken = take(extensions, sent)
        due = {row.trajectory_id: row for row in taken.due}
        for chunk, is_taken in zip(sent, taken.is_taken, strict=True):
            number = chunk.trajectory_id
            former = rows[number]
            try:
                grown = growth(
                    former, chunk, TokenFacts(largest_token_id=5), newest=NEWEST, limits=LIMITS, sampling=SAMPLING
                )
            except ValueError:
                assert not is_taken
                refused += 1
                continue
            assert is_taken
            rows[number] = grown_row(former, chunk, grown)
            assert (number in taken.with_other_bounds) == (former.lease_version != rows[number].lease_version)
            num_behind[number] += 1
            assert (number in due) == (num_behind[number] % MOST_BEHIND == 0)
            assert due.get(number, rows[number]) == rows[number]
            behind += number in due
    assert [extensions.row(number) for number in rows] == list(rows.values())
    assert refused > 100
    assert behind > 5


@pytest.mark.parametrize(
    ("fields", "how"),
    [
        ({"offset": 5}, {}),
        ({"epoch": 2}, {}),
        ({"segments": [Segment("action", 1, 2)]}, {}),
        ({"version_runs": [VersionRun(1, 2)]}, {}),
        ({"version_runs": [VersionRun(10, 2)]}, {}),
        ({}, {"holder": ("rollout-a", "another")}),
        ({}, {"largest": MAX_VOCABULARY}),
        ({"num_tokens": 61, "segments": [Segment("action", 0, 61)], "version_runs": [VersionRun(2, 61)]}, {}),
    ],
    ids=["gap", "epoch", "turn", "version goes back", "no such version", "holder", "vocabulary", "too long"],
)
def test_what_must_not_be_taken_is_not_counted(fields, how) -> None:
    extensions = begun([a_row(3), a_row(4)])
    taken = take(extensions, [a_chunk(a_row(3), 2, 2, **fields), a_chunk(a_row(4), 2, 2)], **how)
    assert taken.is_taken == [False, not how]
    assert extensions.row(3) == a_row(3)


@pytest.mark.parametrize(
    "fields",
    [
        {"status": "free"},
        {"sequences": ((4, 0), (2, -1))},
        {"last_version": -1},
        {"num_segments": 10},
        {"num_turns": 10},
    ],
    ids=str,
)
def test_what_cannot_go_on_with_an_action_gets_no_slot(fields) -> None:
    extensions = begun([a_row(3, **fields)])
    assert extensions.row(3) is None


def test_a_slot_is_used_again_and_remembers_nothing() -> None:
    extensions = begun([a_row(3)])
    assert take(extensions, [a_chunk(a_row(3), 2, 2)]).is_taken == [True]
    extensions.forget(3)
    extensions.forget(3)
    assert extensions.row(3) is None
    assert take(extensions, [a_chunk(a_row(3), 2, 2)]).is_taken == [False]
    extensions.begin(a_row(5, holder_peer="other"), limits=LIMITS, sampling=SAMPLING)
    assert extensions.row(5) == a_row(5, holder_peer="other")
    assert take(extensions, [a_chunk(a_row(5), 2, 2)]).is_taken == [False]
    assert take(extensions, [a_chunk(a_row(5), 2, 2)], holder=("other", "s")).is_taken == [True]
