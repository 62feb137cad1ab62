"""Trains a dense model with random weights on one GPU and prints its speed as JSON.

python -m tests.support.learner.gpu_worker '{"hidden_size": 1024, ...}' OFFLOAD; the first argument is for ``Qwen3Config``.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from gspo.model.logprobs import TokenLogProbs
from gspo.model.packing import PackedBatch, pack
from gspo_services.learner.engine.engine import LearnerEngine
from gspo_services.learner.start.engine_settings import EngineSettings
from gspo_services.shared.settings.sections import Learner
from tests.support.loss.sequences import random_sequence

NUM_TOKENS, NUM_SEQUENCES, NUM_STEPS = 16_384, 8, 4


def random_row(num_sequences: int, length: int, vocab_size: int) -> PackedBatch:
    """Random sequences of this length in one packed row, each with an advantage of 1."""
    sequences = [random_sequence(length, seed, vocab_size=vocab_size) for seed in range(num_sequences)]
    advantages = np.ones(length, dtype=np.float32)
    return pack([replace(sequence, advantages=advantages) for sequence in sequences], policy_version=0)


def policy_gradient(packed: PackedBatch, result: TokenLogProbs) -> Tensor:
    return -(result.logprobs_T * packed.mask_T).sum() / NUM_TOKENS


def main(config: Qwen3Config, offload: Literal["none", "optimizer", "optimizer_and_parameters"]) -> None:
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    learner = Learner(
        dtype="bfloat16",
        zero_stage=2,
        offload=offload,
        activation_checkpointing=True,
        betas=(0.9, 0.999),
        max_tokens_per_micro_batch=8192,
        logprob_chunk_tokens=1024,
    )
    settings = EngineSettings(learner=learner, device="cuda", max_sequence_tokens=None, routing_replay=False, seed=0)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    engine = LearnerEngine.from_model(model, settings)
    length = NUM_TOKENS // NUM_SEQUENCES
    packed = random_row(NUM_SEQUENCES, length, config.vocab_size)
    times = []
    for _ in range(NUM_STEPS + 1):
        step = engine.train_mini_batch([packed], policy_gradient)
        torch.cuda.synchronize()
        times.append(time.monotonic())
    # The first step makes Adam's moments.
    seconds = min(end - begin for begin, end in pairwise(times))
    result = {
        "num_parameters": num_parameters,
        "tokens_per_s": packed.num_tokens / seconds,
        # Forward and backward; recomputed activations and attention are not counted.
        "flops": 6 * num_parameters * packed.num_tokens / seconds,
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "loss": step.loss,
        "masters_on": sorted({master.device.type for master in engine._state._masters()}),
    }
    engine.close()
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    assert sys.argv[2] in ("none", "optimizer", "optimizer_and_parameters")
    main(Qwen3Config(**json.loads(sys.argv[1])), sys.argv[2])  # type: ignore[arg-type]
