"""Chunks whose experts do not fit one frame: cut so that the broker takes each, and each can be continued."""

import msgspec
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from gspo_protocol.channels import WORK
from gspo_protocol.codec import Array, encode, message_type
from gspo_protocol.limits import MAX_EXPERT_BYTES
from gspo_protocol.messages import Chunk, Segment
from gspo_services.rollout.episodes.log import EpisodeLog
from gspo_services.rollout.episodes.writer import EpisodeWriter
from gspo_services.rollout.metrics import RolloutMetrics
from gspo_services.rollout.sglang import OutputPiece
from gspo_services.rollout.trajectory import TokenLog, Trajectory
from tests.support.agent_episodes import LedgerBroker
from tests.support.engines.pieces import a_piece
from tests.support.episodes import a_new_lease, no_tokens

ROOM = WORK.max_frame_bytes_in // MAX_EXPERT_BYTES
LEASE = a_new_lease(max_turn_tokens=10_000, max_tokens=50_000)


def sampled(first: int, num: int, *, known: bool = True) -> OutputPiece:
    """Tokens with the most bytes of experts, which count the tokens from ``first``."""
    piece = a_piece([7] * num, [-1.0] * num, (1, num))
    rows = np.zeros((num, MAX_EXPERT_BYTES // 2, 1, 2), np.uint8)
    rows[:, 0, 0] = np.arange(first, first + num, dtype="<u2").view(np.uint8).reshape(num, 2)
    return msgspec.structs.replace(piece, experts=rows if known else None)


def sent(log: TokenLog) -> list[tuple[Chunk, dict[str, Array]]]:
    """All chunks of ``log``, each of which the broker receives."""
    chunks = []
    while (following := log.next_chunk()) is not None:
        WORK.require_taken(message_type(following[0]), [memoryview(frame).nbytes for frame in encode(*following)])
        log.sent(following[0])
        chunks.append(following)
    return chunks


def numbers(chunks: list[tuple[Chunk, dict[str, Array]]]) -> list[int]:
    """What the experts count."""
    return [number for _, arrays in chunks for number in arrays["experts"][:, 0, 0].copy().view("<u2").ravel().tolist()]


def test_an_answer_is_cut_where_a_frame_is_full_and_only_its_end_completes_the_turn() -> None:
    trajectory = Trajectory(LEASE, no_tokens())
    trajectory.state = {"turn": 0}
    trajectory.observe([1, 2])
    trajectory.act(sampled(0, 3000))
    trajectory.act(sampled(3000, 3000))
    trajectory.turn_done = True
    (first, _), (second, _) = chunks = sent(trajectory)
    assert first.segments == [Segment("observation", 0, 2), Segment("action", 0, ROOM)]
    assert second.segments == [Segment("action", 0, 6000 - ROOM)]
    assert [(each.state, each.turn_done) for each in (first, second)] == [({"turn": 0}, False), (None, True)]
    assert numbers(chunks) == list(range(6000))


def test_what_comes_while_a_part_is_on_its_way_follows_with_its_own_experts() -> None:
    trajectory = Trajectory(LEASE, no_tokens())
    trajectory.observe([1])
    trajectory.act(sampled(0, ROOM + 1))
    first, arrays = trajectory.next_chunk() or pytest.fail("nothing to send")
    trajectory.act(sampled(ROOM + 1, 5))
    trajectory.sent(first)
    assert numbers([(first, arrays), *sent(trajectory)]) == list(range(ROOM + 6))


async def test_the_broker_takes_all_parts_of_an_agents_parallel_calls() -> None:
    """Their pieces come into the log while the writer waits for credit."""
    log = EpisodeLog(LEASE, no_tokens())
    broker = LedgerBroker(LEASE.sampling)
    writer = EpisodeWriter(log, [], broker, RolloutMetrics(CollectorRegistry()))
    for at in range(0, 4 * ROOM, 1000):
        sequence = at // 1000 % 4
        log.observe(sequence, [1, 2])
        log.act(sequence, sampled(at, 1000))
    async with writer.alone():
        await writer.tokens()
    assert len(broker.chunks) == 5
    assert all(encode(*each)[3].nbytes <= WORK.max_frame_bytes_in for each in broker.chunks)  # type: ignore[union-attr]
    assert [len(chunk.turn_rewards) for chunk, _ in broker.chunks] == [0, 4, 4, 4, 0]
    assert numbers(broker.chunks) == list(range(16_000))  # type: ignore[arg-type]
    assert broker.row.num_tokens == log.num_tokens
