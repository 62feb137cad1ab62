"""Rollouts and a learner whose every message is known, so that what was acknowledged can be looked for afterwards."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gspo_protocol.messages import Chunk, Message
from gspo_services.broker.store import LEDGER_FILE, Reader, reading
from tests.support.broker.peers import ScriptedRollout, logprobs_of, tokens_of


@dataclass
class WatchedRollout(ScriptedRollout):
    """Remembers each chunk under its sequence number, and how far it has sampled each trajectory."""

    chunks: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """Trajectory, offset and tokens of each chunk that was sent."""

    def __post_init__(self) -> None:
        super().__post_init__()
        send = self.peer.send

        async def watched(message: Message, arrays: Mapping[str, Any] | None = None) -> None:
            await send(message, arrays)
            if isinstance(message, Chunk):
                # Nothing was pushed since: this is the number of the message before.
                self.chunks[self.peer._outbox.next_seq - 1] = (message.trajectory_id, message.offset, message.num_tokens)

        self.peer.send = watched  # type: ignore[method-assign]

    @property
    def acknowledged(self) -> list[tuple[int, int, int]]:
        """Chunks that the broker has acknowledged."""
        return [chunk for seq, chunk in self.chunks.items() if seq < self.peer.num_acknowledged]

    @property
    def num_known(self) -> int:
        """Acknowledged messages."""
        return self.peer.num_acknowledged


def regenerated(rollouts: list[WatchedRollout]) -> int:
    """Tokens that were sampled more than once: of several chunks of a trajectory with the same tokens all but one."""
    most: dict[int, int] = {}
    total: dict[int, int] = {}
    for rollout in rollouts:
        for trajectory_id, offset, num_tokens in rollout.chunks.values():
            total[trajectory_id] = total.get(trajectory_id, 0) + num_tokens
            most[trajectory_id] = max(most.get(trajectory_id, 0), offset + num_tokens)
    return sum(total[each] - most[each] for each in total)


def missing(directory: Path, rollouts: list[WatchedRollout]) -> tuple[int, int]:
    """Acknowledged chunks in all, and those that the ledger does not hold, or holds with other content."""
    acknowledged = {chunk for rollout in rollouts for chunk in rollout.acknowledged}
    lost = 0
    with reading(directory) as connection:
        ledger = Reader(directory / LEDGER_FILE, connection)
        held = {trajectory_id: ledger.payload(trajectory_id) for trajectory_id in {chunk[0] for chunk in acknowledged}}
    for trajectory_id, offset, num_tokens in acknowledged:
        end, payload = offset + num_tokens, held[trajectory_id]
        is_there = payload.num_tokens >= end and (
            payload.token_ids[offset:end].tolist() == tokens_of(trajectory_id, end)[offset:].tolist()
            and payload.logprobs[offset:end].tolist() == logprobs_of(trajectory_id, end)[offset:].tolist()
        )
        lost += not is_there
    return len(acknowledged), lost
