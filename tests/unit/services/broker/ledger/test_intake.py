"""What may be taken: tokens, turns, versions and rewards that everything behind the ledger can live with."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gspo_protocol.codec import decode, encode
from gspo_protocol.limits import MAX_CHUNK_TOKENS, MAX_VERSION, MAX_VERSION_STEP, TrajectoryLimits, trajectory_limits
from gspo_protocol.messages import Chunk, GroupSampling, Published, Refused, Segment, Status, Trained, VersionRun
from gspo_services.broker.ledger.intake import Growth, TokenFacts, check_published, check_trained, growth
from gspo_services.broker.rows import TrajectoryRow, VersionRow
from tests.support.broker.ledger import SAMPLING, chunk, replies
from tests.support.broker.ledger_leases import R1, harness
from tests.support.broker.ledger_training import generate, train_one
from tests.support.broker.ledger_training import harness as learners_harness

NEWEST = VersionRow(policy_version=9, endpoint="tcp://w:1", digest="d", num_bytes=1, trained_batches=0, vocabulary=100)
BEGUN = TrajectoryRow(
    trajectory_id=1, group_id=1, status="leased", epoch=1, lease_version=4, num_tokens=6, num_action_tokens=3,
    version_sum=12, min_version=4, num_turns=1, num_segments=2, num_runs=2, last_version=4,
)  # fmt: skip
"""A prompt of three tokens and three tokens of version 4 of the first turn."""
WIDE = trajectory_limits(1)


def a_chunk(row: TrajectoryRow, segments: list[Segment], runs: list[VersionRun], **fields: Any) -> Chunk:
    """The chunk that follows ``row``."""
    return Chunk(
        trajectory_id=row.trajectory_id,
        epoch=row.epoch,
        offset=row.num_tokens,
        num_tokens=sum(segment.num_tokens for segment in segments),
        segments=segments,
        version_runs=runs,
        **{"state": {}, **fields},
    )


def grown(row: TrajectoryRow, sent: Chunk, *, largest: int = 99, limits: TrajectoryLimits = WIDE) -> Growth:
    return growth(row, sent, TokenFacts(largest_token_id=largest), newest=NEWEST, limits=limits, sampling=SAMPLING)


@given(data=st.data(), turns=st.integers(1, 4))
def test_growth_agrees_with_counting_token_by_token(data: st.DataObject, turns: int) -> None:
    segments: list[Segment] = []
    versions: list[int] = []
    version = 1
    for turn in range(turns):
        for kind in ("observation", "action"):
            num = data.draw(st.integers(1, 4))
            segments.append(Segment(kind, turn, num))  # type: ignore[arg-type]
            for _ in range(num):
                version = data.draw(st.integers(version, 9)) if kind == "action" else version
                versions.append(version if kind == "action" else -1)
    row = TrajectoryRow(trajectory_id=0, group_id=0, lease_version=1)
    sent = a_chunk(row, segments, [VersionRun(version, 1) for version in versions], turn_rewards=[0.5] * (turns - 1))
    found = grown(row, sent)
    actions = [version for version in versions if version != -1]
    assert (found.num_actions, found.version_sum) == (len(actions), sum(actions))
    assert (found.oldest, found.newest, found.last_version) == (min(actions), actions[-1], actions[-1])
    assert (found.num_turns, found.num_segments) == (turns, 2 * turns)
    assert found.num_runs == 1 + sum(before != after for before, after in pairwise(versions))
    assert found.reward_size == 0.5 * (turns - 1)


@pytest.mark.parametrize(
    ("segments", "runs", "fields", "reason"),
    [
        ([Segment("action", 0, 2)], [VersionRun(-1, 2)], {}, "version -1 to action tokens: published are 1 to 9"),
        ([Segment("action", 0, 2)], [VersionRun(10, 2)], {}, "version 10 to action tokens"),
        ([Segment("action", 0, 2)], [VersionRun(0, 2)], {}, "version 0 to action tokens"),
        (
            [Segment("action", 0, 2)],
            [VersionRun(3, 2)],
            {},
            "version 3 to .* the lease's engine served 4 before",
        ),
        ([Segment("action", 0, 2)], [VersionRun(6, 1), VersionRun(5, 1)], {}, "version 5 .* served 6 before"),
        ([Segment("observation", 1, 2)], [VersionRun(4, 2)], {"turn_rewards": [1.0]}, "version 4 to observation tokens"),
        ([Segment("action", 2, 2)], [VersionRun(4, 2)], {}, "action of turn 2, 1 must follow"),
        ([Segment("action", 1, 2)], [VersionRun(4, 2)], {}, "0 turn_rewards for 1 turns that the chunk completes"),
        ([Segment("observation", 0, 2)], [VersionRun(-1, 2)], {}, "observation of turn 0, 1 must follow"),
        ([Segment("observation", 2, 2)], [VersionRun(-1, 2)], {}, "observation of turn 2, 1 must follow"),
        ([Segment("observation", 1, 2)], [VersionRun(-1, 2)], {}, "0 turn_rewards for 1 turns that the chunk completes"),
        ([Segment("action", 0, 2)], [VersionRun(4, 2)], {"turn_rewards": [1.0]}, "1 turn_rewards for 0 turns"),
        (
            [Segment("observation", 1, 2)],
            [VersionRun(-1, 2)],
            {"turn_rewards": [1.0], "turn_done": True},
            "turn_done is set after an observation",
        ),
        ([Segment("action", 0, 59)], [VersionRun(4, 59)], {}, "65 tokens, 64 allowed .sampling.max_tokens"),
    ],
)
def test_a_chunk_that_nobody_could_go_on_with_is_named(
    segments: list[Segment], runs: list[VersionRun], fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        grown(BEGUN, a_chunk(BEGUN, segments, runs, **fields))


def test_a_turn_may_follow_another_without_an_observation() -> None:
    sent = a_chunk(BEGUN, [Segment("action", 0, 1), Segment("action", 1, 2)], [VersionRun(4, 3)], turn_rewards=[1.0])
    found = grown(BEGUN, sent)
    assert (found.num_turns, found.num_segments, found.num_runs) == (2, 3, 2)


def test_the_first_token_cannot_be_an_action_and_the_first_chunk_has_a_state() -> None:
    new = TrajectoryRow(trajectory_id=1, group_id=1)
    with pytest.raises(ValueError, match="the first token is an action"):
        grown(new, a_chunk(new, [Segment("action", 0, 2)], [VersionRun(4, 2)]))
    with pytest.raises(ValueError, match="state is missing from the first chunk"):
        grown(new, a_chunk(new, [Segment("observation", 0, 2)], [VersionRun(-1, 2)], state=None))


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    sent = a_chunk(BEGUN, [Segment("action", 0, 2)], [VersionRun(4, 2)])
    assert grown(BEGUN, sent, largest=99).num_actions == 2
    with pytest.raises(ValueError, match="token_ids hold 100: the model's vocabulary has 100 tokens"):
        grown(BEGUN, sent, largest=100)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (TrajectoryLimits(turns=1, segments=9, runs=9), "2 turns, 1 allowed"),
        (TrajectoryLimits(turns=9, segments=3, runs=9), "4 segments, 3 allowed"),
        (TrajectoryLimits(turns=9, segments=9, runs=4), "5 version runs, 4 allowed"),
    ],
)
def test_a_trajectory_of_more_pieces_than_fit_a_batch_is_refused(limits: TrajectoryLimits, reason: str) -> None:
    pieces = [Segment("action", 0, 1), Segment("observation", 1, 2), Segment("action", 1, 1), Segment("action", 1, 1)]
    runs = [VersionRun(4, 1), VersionRun(-1, 1), VersionRun(-1, 1), VersionRun(4, 1), VersionRun(5, 1)]
    sent = a_chunk(BEGUN, pieces, runs, turn_rewards=[1.0])
    exact = grown(BEGUN, sent, limits=TrajectoryLimits(turns=2, segments=4, runs=5))
    assert (exact.num_turns, exact.num_segments, exact.num_runs) == (2, 4, 5)
    with pytest.raises(ValueError, match=reason):
        grown(BEGUN, sent, limits=limits)


def test_rewards_that_add_up_to_more_than_can_be_trained_on_are_refused() -> None:
    sent = a_chunk(BEGUN, [Segment("observation", 1, 2)], [VersionRun(-1, 2)], turn_rewards=[-7e5])
    assert grown(BEGUN, sent).reward_size == 7e5
    with pytest.raises(ValueError, match=r"sum of absolute values of 1.4e\+06, 1e\+06 allowed \(MAX_REWARD\)"):
        grown(replace(BEGUN, reward_size=7e5), sent)


def test_a_chunk_older_than_its_lease_is_a_failed_attempt_and_nothing_becomes_stale() -> None:
    world = harness(version=5, max_lag=2)
    (lease,) = world.lease(R1, version=5)
    actions = world.send(R1, chunk(lease, 0, 3, 1))
    assert "the lease's engine served 5 before" in replies(actions, Refused)[0].reason
    row = world.ledger.state.groups.trajectory(lease.trajectory_id)
    assert row is not None
    assert (row.status, row.attempts, row.num_tokens) == ("free", 1, 0)
    assert world.ledger.state.num_dropped == {}


def test_a_version_far_ahead_or_of_another_model_is_refused() -> None:
    sent = Published(policy_version=10, endpoint="tcp://w:1", digest="d", num_bytes=1, trained_batches=0, vocabulary=100)
    check_published(sent, NEWEST)
    with pytest.raises(ValueError, match=r"1000010, 1000009 allowed now \(MAX_VERSION_STEP\)"):
        check_published(replace(sent, policy_version=10 + MAX_VERSION_STEP), NEWEST)
    with pytest.raises(ValueError, match="vocabulary is 101, that of version 9 is 100: the model was changed"):
        check_published(replace(sent, vocabulary=101), NEWEST)


def test_an_endpoint_that_no_rollout_can_connect_to_is_refused() -> None:
    sent = Published(policy_version=10, endpoint="tcp://w:1", digest="d", num_bytes=1, trained_batches=0, vocabulary=100)
    check_published(sent, NEWEST)
    for endpoint in ("tcp://w", "tcp://*:7003", "w" * 1024):
        with pytest.raises(ValueError, match=r"endpoint is '.*: expected tcp://HOST:PORT"):
            check_published(replace(sent, endpoint=endpoint), NEWEST)


def test_metrics_cannot_take_the_place_of_a_lines_own_fields() -> None:
    check_trained(Trained(index=0, policy_version=1, metrics={"loss": 1.0}))
    with pytest.raises(ValueError, match="metrics has 'line'"):
        check_trained(Trained(index=0, policy_version=1, metrics={"line": 7.0}))


def test_a_mean_that_overflows_is_no_reason_to_die() -> None:
    """Rows of rewards without a limit, as a damaged or an older ledger may hold them."""
    world = learners_harness()
    generate(world, 4, 1)
    groups = world.ledger.state.groups
    for row in [member for group in groups.of_split("train") for member in groups.members(group.group_id)]:
        groups._put(replace(row, turn_rewards=(1.7e308, 1.7e308)))
    train_one(world, 0, 1)
    (line,) = world.store.metrics_after(0)
    assert (line["event"], line["train/reward"], line["loss"]) == ("batch", None, 0.25)
    world.restart()
    status = Status(status=world.ledger.status(world.now))
    assert decode(encode(status)).message == status


def test_a_long_chunk_of_the_highest_version_is_stored_and_shown() -> None:
    last = replace(NEWEST, policy_version=MAX_VERSION)
    segments = [Segment("observation", 0, 1), Segment("action", 0, MAX_CHUNK_TOKENS - 1)]
    row = TrajectoryRow(trajectory_id=0, group_id=0, lease_version=1)
    sent = a_chunk(row, segments, [VersionRun(-1, 1), VersionRun(MAX_VERSION, MAX_CHUNK_TOKENS - 1)])
    found = growth(
        row,
        sent,
        TokenFacts(largest_token_id=9),
        newest=last,
        limits=WIDE,
        sampling=GroupSampling(1.0, MAX_CHUNK_TOKENS - 1, MAX_CHUNK_TOKENS, MAX_CHUNK_TOKENS),
    )
    # SQLite holds 64 bits, and what reads Status as JSON may hold 53.
    assert MAX_VERSION * (MAX_CHUNK_TOKENS - 1) == found.version_sum < 2**53
