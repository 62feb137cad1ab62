"""Rollouts and a learner whose every message is known, so that what was acknowledged can be looked for afterwards."""

from pathlib import Path

from gspo_services.broker.store import LEDGER_FILE, Reader, reading
from tests.support.broker.peers import ScriptedRollout, logprobs_of, tokens_of


def regenerated(rollouts: list[ScriptedRollout]) -> int:
    """Tokens that were sampled more than once: of several chunks of a trajectory with the same tokens all but one."""
    most: dict[int, int] = {}
    total: dict[int, int] = {}
    for rollout in rollouts:
        for trajectory_id, offset, num_tokens in rollout.chunks.values():
            total[trajectory_id] = total.get(trajectory_id, 0) + num_tokens
            most[trajectory_id] = max(most.get(trajectory_id, 0), offset + num_tokens)
    return sum(total[each] - most[each] for each in total)


def missing(directory: Path, rollouts: list[ScriptedRollout]) -> tuple[int, int]:
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
