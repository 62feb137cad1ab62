"""Log-probs of sequences under a model's folder, as the learner computes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gspo.model.packing import TrainSequence, pack
from gspo.model.policy import load_policy, prepare_policy
from tests.support.policy.forward import logprobs_of

Logprobs = np.ndarray[Any, np.dtype[np.float32]]


def learner_logprobs(
    folder: Path, sequence: TrainSequence, dtype: torch.dtype = torch.float32, *, float32_head: bool = False
) -> Logprobs:
    """Of one sequence: float32 [T - 1]."""
    return learner_logprobs_of(folder, [sequence], dtype, float32_head=float32_head)[0]


def learner_logprobs_of(
    folder: Path, sequences: Sequence[TrainSequence], dtype: torch.dtype = torch.float32, *, float32_head: bool = False
) -> list[Logprobs]:
    """Of each sequence: float32 [T - 1]; the model is loaded once."""
    model = load_policy(folder, dtype)
    prepare_policy(model, logprob_chunk_tokens=100, float32_head=float32_head)
    found = []
    for sequence in sequences:
        scored = sequence.with_advantages(np.zeros(sequence.num_tokens, np.float32))
        found.append(logprobs_of(model, pack([scored], policy_version=0)).logprobs_T[:-1].detach().numpy())
    return found
