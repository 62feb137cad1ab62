"""Log-probs of a fixed sequence, computed when a checkpoint is saved and again when it is loaded.

A digest of the weights covers every bit, but not their use: partitions that were not gathered again, or
experts under each other's names, give wrong answers with the right digest.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from gspo.model.packing import PackedBatch, TrainSequence, pack
from gspo_services.learner.checkpoints.format import CheckpointError

NUM_TOKENS: Final = 32
TOLERANCE: Final = {"float32": 1e-3, "bfloat16": 0.3}
"""Largest mean difference between layouts: sums differ, and in bfloat16 now and then a chosen expert, which moves one
token's log-prob by 1 or more."""
_FILE: Final = "canary.json"


class _Canary(msgspec.Struct):
    logprobs: list[float]


def canary_batch(vocab_size: int, adapter: int = 0) -> PackedBatch:
    """One sequence of tokens from the whole vocabulary, with the adapter of this place."""
    positions = np.arange(NUM_TOKENS)
    actions = positions > 0
    sequence = TrainSequence(
        token_ids=(positions * positions * 7919 + 31 * positions + 7) % vocab_size,
        action_mask=actions,
        behaviour_logprobs=np.zeros(NUM_TOKENS, dtype=np.float32),
        versions=np.where(actions, 0, -1),
        turn_ids=np.where(actions, 0, -1).astype(np.int32),
        temperature=1.0,
        adapter=adapter,
        advantages=np.zeros(NUM_TOKENS, dtype=np.float32),
    )
    return pack([sequence], policy_version=0)


def write_canary(directory: Path, logprobs: Sequence[float]) -> Path:
    """Write the log-probs into ``directory``. Raises: OSError."""
    path = directory / _FILE
    path.write_bytes(msgspec.json.encode(_Canary([round(logprob, 6) for logprob in logprobs])))
    return path


def require_canary(directory: Path, logprobs: Sequence[float], dtype: str) -> None:
    """Compare with the saved log-probs. Raises: CheckpointError when they differ."""
    path = directory / _FILE
    try:
        saved = msgspec.json.decode(path.read_bytes(), type=_Canary).logprobs
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}; resume from another checkpoint") from error
    if len(saved) != len(logprobs):
        raise CheckpointError(f"{path} has {len(saved)} log-probs, not {len(logprobs)}; resume from another checkpoint")
    differences = [abs(before - now) for before, now in zip(saved, logprobs, strict=True)]
    # Not ``> tolerance``, which NaN passes.
    if not sum(differences) / len(differences) <= TOLERANCE[dtype]:
        worst = int(np.argmax(differences))
        raise CheckpointError(
            f"{directory}: after loading, token {worst} of the test sequence has log-prob {logprobs[worst]:.5f}, saved was "
            f"{saved[worst]:.5f}, in {dtype}: the weights compute other values here; resume in the layout that saved them"
        )
