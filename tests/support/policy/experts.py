"""Packed batches of a small mixture of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from gspo.model.packing import PackedBatch, pack
from gspo.model.policy import prepare_policy
from gspo.moe.experts import ExpertPicks, ExpertRecorder
from tests.support.learner.tiny_model import TINY_VOCAB_SIZE
from tests.support.loss.sequences import random_sequence

LENGTHS = (9, 30, 17)
NUM_LAYERS, NUM_EXPERTS, TOP_K = 2, 4, 2


def packed_batch(lengths: Sequence[int] = LENGTHS) -> PackedBatch:
    sequences = [random_sequence(length, length, vocab_size=TINY_VOCAB_SIZE) for length in lengths]
    with_advantages = [sequence.with_advantages(np.zeros(sequence.num_tokens, dtype=np.float32)) for sequence in sequences]
    return pack(with_advantages, policy_version=5)


def recorded(model: Any, packed: PackedBatch) -> tuple[ExpertRecorder, ExpertPicks | None, Tensor]:
    recorder = ExpertRecorder(model)
    with recorder.recording():
        result = model(
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            cu_seqlens=packed.cu_seqlens,
            targets_T=packed.targets_T,
            temperatures_T=packed.temperatures_T,
        )
    return recorder, recorder.take(), result.logprobs_T


def prepared(model: Any) -> Any:
    prepare_policy(model, logprob_chunk_tokens=64, activation_checkpointing=True)
    return model
