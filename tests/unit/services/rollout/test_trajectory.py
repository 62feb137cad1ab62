"""A trajectory as it grows: chunks, offsets, segments, versions."""

import msgspec
import numpy as np
import pytest

from gspo_protocol.messages import Segment, VersionRun
from gspo_services.rollout.sglang import OutputPiece
from gspo_services.rollout.trajectory import Trajectory
from tests.support.builders import a_lease, lease_arrays
from tests.support.engines.pieces import a_piece
from tests.support.episodes import a_new_lease, no_tokens


def test_a_chunk_holds_what_was_not_sent_yet_with_kinds_turns_and_versions() -> None:
    trajectory = Trajectory(a_new_lease(), no_tokens())
    trajectory.state = {"turn": 0}
    trajectory.observe([11, 12, 13])
    trajectory.act(a_piece([21, 22], [-0.5, -0.25], (4, 2)))
    trajectory.act(a_piece([23, 24, 25], [-1.0, -2.0, -3.0], (4, 1), (5, 2)))
    following = trajectory.next_chunk()
    assert following is not None
    chunk, arrays = following
    assert (chunk.trajectory_id, chunk.epoch, chunk.offset, chunk.num_tokens) == (7, 1, 0, 8)
    assert chunk.segments == [Segment("observation", 0, 3), Segment("action", 0, 5)]
    assert chunk.version_runs == [VersionRun(-1, 3), VersionRun(4, 3), VersionRun(5, 2)]
    assert chunk.state == {"turn": 0}
    assert arrays["token_ids"].tolist() == [11, 12, 13, 21, 22, 23, 24, 25]
    np.testing.assert_array_equal(arrays["logprobs"], np.float32([0, 0, 0, -0.5, -0.25, -1, -2, -3]))


def test_a_chunk_is_the_same_until_it_is_sent_and_the_next_begins_behind_it() -> None:
    trajectory = Trajectory(a_new_lease(), no_tokens())
    trajectory.observe([1, 2])
    first = trajectory.next_chunk()
    again = trajectory.next_chunk()
    assert first is not None
    assert again is not None
    assert first[0] == again[0]
    trajectory.act(a_piece([3], [-1.0], (1, 1)))
    trajectory.sent(first[0])
    assert trajectory.num_unsent == 1
    following = trajectory.next_chunk()
    assert following is not None
    assert (following[0].offset, following[0].num_tokens) == (2, 1)
    trajectory.sent(following[0])
    assert trajectory.next_chunk() is None


def with_experts(piece: OutputPiece, first: int) -> OutputPiece:
    """The piece with a row of experts for each token, counted from ``first``."""
    rows = np.arange(first, first + len(piece.token_ids), dtype=np.uint8).reshape(-1, 1, 1, 1)
    return msgspec.structs.replace(piece, experts=rows)


def test_experts_of_sampled_tokens_leave_once_with_their_chunk() -> None:
    """Also those of tokens that came while a chunk was on its way; tokens without any have unknown ones."""
    trajectory = Trajectory(a_new_lease(), no_tokens())
    trajectory.observe([1, 2])
    trajectory.act(with_experts(a_piece([3, 4], [-1.0] * 2, (1, 2)), 10))
    chunk, arrays = trajectory.next_chunk() or pytest.fail("nothing to send")
    assert arrays["experts"].ravel().tolist() == [10, 11]
    trajectory.act(with_experts(a_piece([5], [-1.0], (1, 1)), 12))
    trajectory.act(a_piece([6], [-1.0], (1, 1)))
    trajectory.sent(chunk)
    chunk, arrays = trajectory.next_chunk() or pytest.fail("nothing to send")
    assert arrays["experts"].ravel().tolist() == [12, 255]
    trajectory.sent(chunk)
    trajectory.observe([7])
    _, arrays = trajectory.next_chunk() or pytest.fail("nothing to send")
    assert "experts" not in arrays


def test_an_evaluation_which_nobody_trains_on_sends_no_experts() -> None:
    trajectory = Trajectory(a_new_lease(split="eval"), no_tokens())
    trajectory.act(with_experts(a_piece([3, 4], [-1.0] * 2, (1, 2)), 10))
    _, arrays = trajectory.next_chunk() or pytest.fail("nothing to send")
    assert "experts" not in arrays


def test_a_chunk_under_way_keeps_its_tokens_while_more_come() -> None:
    trajectory = Trajectory(a_new_lease(), no_tokens())
    trajectory.act(a_piece(range(200), [-1.0] * 200, (1, 200)))
    following = trajectory.next_chunk()
    assert following is not None
    chunk, arrays = following
    trajectory.act(a_piece(range(1000, 1400), [-2.0] * 400, (1, 400)))
    assert chunk.num_tokens == 200
    assert arrays["token_ids"].tolist() == list(range(200))
    assert arrays["logprobs"].tolist() == [-1.0] * 200
    trajectory.sent(chunk)
    rest, arrays = trajectory.next_chunk() or pytest.fail("nothing to send")
    assert (rest.segments, rest.version_runs) == ([Segment("action", 0, 400)], [VersionRun(1, 400)])
    assert arrays["token_ids"].tolist() == list(range(1000, 1400))


def test_turns_keep_their_tokens_apart_also_when_nothing_stands_between_them() -> None:
    trajectory = Trajectory(a_new_lease(), no_tokens())
    trajectory.act(a_piece([1, 2], [-1.0, -1.0], (1, 2)))
    trajectory.turn_done = True
    trajectory.end_turn(0.5)
    assert not trajectory.turn_done
    trajectory.act(a_piece([3], [-1.0], (1, 1)))
    assert trajectory.action_ids == [3]
    following = trajectory.next_chunk()
    assert following is not None
    assert following[0].segments == [Segment("action", 0, 2), Segment("action", 1, 1)]
    assert following[0].turn_rewards == [0.5]


def test_a_lease_with_tokens_goes_on_behind_them() -> None:
    trajectory = Trajectory(a_lease(turn_done=False), lease_arrays())
    assert trajectory.num_unsent == 0
    assert trajectory.action_ids == [7, 8, 9]
    trajectory.act(a_piece([42], [-0.125], (6, 1)))
    following = trajectory.next_chunk()
    assert following is not None
    chunk, arrays = following
    assert (chunk.epoch, chunk.offset, chunk.num_tokens) == (3, 5, 1)
    assert chunk.version_runs == [VersionRun(6, 1)]
    assert arrays["token_ids"].tolist() == [42]


def test_the_turn_of_a_resumed_trajectory_follows_from_the_rewards_it_has() -> None:
    trajectory = Trajectory(a_lease(), lease_arrays(turn_rewards=[0.5]))
    assert trajectory.turn == 1
    assert trajectory.action_ids == []


def test_a_token_without_its_logprob_or_version_is_refused() -> None:
    trajectory = Trajectory(a_new_lease(), no_tokens())
    with pytest.raises(ValueError, match="2 token ids, 1 log-probs and 2 versions"):
        trajectory.act(a_piece([1, 2], [-1.0], (1, 2)))
    assert trajectory.num_tokens == 0


def test_a_state_that_has_not_changed_is_not_sent_again() -> None:
    trajectory = Trajectory(a_new_lease(), no_tokens())
    trajectory.state = {"turn": [0]}
    sent = []
    for number in range(4):
        if number == 2:
            trajectory.state["turn"][0] = 1  # also one that changes in place
        trajectory.observe([number])
        chunk, _ = trajectory.next_chunk() or pytest.fail("nothing to send")
        trajectory.sent(chunk)
        sent.append(chunk.state)
    assert sent[0] is not None
    assert [state is None for state in sent] == [False, True, False, True]
    assert sent[2] == {"turn": [1]}


def test_a_state_that_came_with_the_lease_is_not_sent_back() -> None:
    lease = a_lease()
    trajectory = Trajectory(lease, lease_arrays())
    trajectory.observe([1])
    following = trajectory.next_chunk()
    assert following is not None
    assert lease.state is not None
    assert following[0].state is None
