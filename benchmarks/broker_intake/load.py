"""The messages that all measurements use."""

from typing import Final

import numpy as np

from gspo_protocol.codec import Array
from gspo_protocol.messages import Chunk, Segment, VersionRun

CHUNKS_PER_TRAJECTORY: Final = 32
LEASES: Final = 64
"""Trajectories that one producer extends in turn, as many as ``rollout.max_running``."""
TOKEN_BYTES: Final = 8
"""An int32 id and a float32 log-prob."""


def a_chunk(trajectory_id: int, epoch: int, offset: int, num_tokens: int, version: int = 1) -> Chunk:
    """Make tokens of one action turn and one version, after a prompt of one token."""
    prompt = 1 if offset == 0 else 0
    return Chunk(
        trajectory_id=trajectory_id,
        epoch=epoch,
        offset=offset,
        num_tokens=num_tokens,
        segments=[Segment("observation", 0, 1)] * prompt + [Segment("action", 0, num_tokens - prompt)],
        version_runs=[VersionRun(-1, 1)] * prompt + [VersionRun(version, num_tokens - prompt)],
        state={},
    )


def arrays_of(num_tokens: int) -> dict[str, Array]:
    token_ids = np.arange(num_tokens, dtype=np.int32)
    return {"token_ids": token_ids, "logprobs": (-token_ids / 1024).astype(np.float32)}
