"""Layers of Qwen3-30B-A3B under the learner: tokens a second, use of the device, memory, waits, and where the time goes.

python -m tests.gpu.half_hour.layers NUM_LAYERS [LEARNER SETTING=JSON ...]
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from gspo.model.packing import PackedBatch
from gspo.settings import Objective
from gspo_services.learner.batch_run import Trackers
from gspo_services.learner.engine.engine import LearnerEngine
from gspo_services.learner.start.engine_settings import EngineSettings
from gspo_services.learner.trainer import BatchReport
from gspo_services.shared.settings.sections import Learner
from tests.gpu.half_hour.shapes import QWEN3_30B_A3B, SMALL, moe_config
from tests.support.learner.gpu_worker import policy_gradient, random_row
from tests.support.learner.trained import train
from tests.support.loss.sequences import random_groups

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_TOKENS, NUM_SEQUENCES, NUM_STEPS = 16_384 if DEVICE == "cuda" else 256, 8, 4
SHAPE = QWEN3_30B_A3B if DEVICE == "cuda" else SMALL
PEAK_FLOPS = 989e12
"""Dense bfloat16 of an H100 or H200 SXM, from the data sheet."""


def active_parameters(model: Any) -> int:
    """Parameters in a token's matrix products: all but the experts that were not chosen, and the embedding."""
    inactive = 1 - SHAPE["num_experts_per_tok"] / SHAPE["num_experts"]
    experts = sum(value.numel() for name, value in model.named_parameters() if ".experts." in name)
    embedding = model.get_input_embeddings().weight.numel()
    return round(sum(value.numel() for value in model.parameters()) - embedding - inactive * experts)


def waits(engine: LearnerEngine) -> dict[str, int]:
    """How often a batch of two steps with the product's loss makes the host wait for the device, by the line that does."""
    groups = random_groups(8, 8, seed=1, vocab_size=SHAPE["vocab_size"] - 16, versions=(0, 1))
    objective, counted, trackers = Objective(), dict[str, int](), Trackers()

    def batch() -> BatchReport:
        return train(engine, groups, objective, policy_version=1, num_mini_batches=2, trackers=trackers)

    batch()  # The first one checks that every parameter gets a gradient, and nothing is calibrated yet.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        batch()
        torch.cuda.set_sync_debug_mode("default")
    for warning in caught:
        if "synchroniz" in str(warning.message):
            place = f"{'/'.join(Path(warning.filename).parts[-3:])}:{warning.lineno}"
            counted[place] = counted.get(place, 0) + 1
    return dict(sorted(counted.items(), key=lambda item: -item[1]))


def profile(engine: LearnerEngine, packed: PackedBatch) -> list[str]:
    """The kernels that take most of one step, with their share."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        engine.train_mini_batch([packed], policy_gradient)
        torch.cuda.synchronize()
    kernels = sorted(profiler.key_averages(), key=lambda kernel: -kernel.self_device_time_total)
    total = sum(kernel.self_device_time_total for kernel in kernels)
    times = [(kernel.self_device_time_total / 1e3, kernel.count, kernel.key[:90]) for kernel in kernels[:14]]
    return [
        f"{1e3 * milliseconds / total:.1%} {milliseconds:.1f} ms {count} x {name}" for milliseconds, count, name in times
    ]


def main(num_layers: int, given: dict[str, Any]) -> None:
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(moe_config(SHAPE, num_layers), dtype=torch.bfloat16)
    values: dict[str, Any] = {
        "dtype": "bfloat16", "zero_stage": 2, "activation_checkpointing": True, "max_tokens_per_micro_batch": NUM_TOKENS,
        "logprob_chunk_tokens": 1024,
    }  # fmt: skip
    learner = Learner(**(values | given))
    settings = EngineSettings(
        learner=learner, device="cuda" if DEVICE == "cuda" else "cpu", max_sequence_tokens=None, routing_replay=False, seed=0
    )
    total, active = sum(parameter.numel() for parameter in model.parameters()), active_parameters(model)
    engine = LearnerEngine.from_model(model, settings)
    length = NUM_TOKENS // NUM_SEQUENCES
    packed = random_row(NUM_SEQUENCES, length, SHAPE["vocab_size"])
    times = []
    for _ in range(NUM_STEPS + 1):
        engine.train_mini_batch([packed], policy_gradient)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        times.append(time.monotonic())
    seconds = min(end - begin for begin, end in pairwise(times))
    engine.logprobs(packed)
    begin = time.monotonic()
    engine.logprobs(packed).logprobs_T.sum().item()
    found: dict[str, Any] = {
        "layers": num_layers,
        "settings": given,
        "parameters": total,
        "active_parameters": active,
        "experts": getattr(model.config, "_experts_implementation", None),
        "step_s": round(seconds, 4),
        "tokens_per_s": round(packed.num_tokens / seconds),
        "mfu": round(6 * active * packed.num_tokens / seconds / PEAK_FLOPS, 3),
        "logprobs_s": round(time.monotonic() - begin, 4),
    }
    if DEVICE == "cuda":
        found["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
        found["waits"] = waits(engine)
        found["kernels"] = profile(engine, packed)
    engine.close()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), {name: json.loads(value) for name, _, value in (word.partition("=") for word in sys.argv[2:])})
