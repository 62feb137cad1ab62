"""Rows of the broker's store."""

import numpy as np

from gspo_protocol.messages import Chunk, Segment, VersionRun
from gspo_services.broker.rows import GroupRow
from tests.support.broker.ledger import SAMPLING


def group(group_id: int = 0) -> GroupRow:
    return GroupRow(
        group_id=group_id, split="train", prompt=group_id, task_index=9, evaluation=None, status="open", sampling=SAMPLING
    )


def chunk_of(trajectory_id: int, offset: int, num_tokens: int, state: dict[str, int] | None = None) -> Chunk:
    return Chunk(
        trajectory_id=trajectory_id,
        epoch=1,
        offset=offset,
        num_tokens=num_tokens,
        segments=[Segment("action", 0, num_tokens)],
        version_runs=[VersionRun(1, num_tokens)],
        state=state,
        turn_done=offset > 0,
        turn_rewards=[0.5] if offset else [],
    )


def arrays(num_tokens: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 2**31 - 1, num_tokens, dtype=np.int32), -rng.random(num_tokens, dtype=np.float32)
