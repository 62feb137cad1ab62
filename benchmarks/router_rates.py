"""How many choices of experts change when routers learn at a rate of their own: python -m benchmarks.router_rates

A tiny random Qwen3-MoE (2 layers, 4 experts of which 2 are used) makes optimizer steps on the same groups. The share of the
action tokens' choices that are no longer those of the start model, after each step, for each learner.router_rate_factor.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch

from gspo.model.packing import pack
from gspo.moe.experts import changed_share
from gspo_services.learner.engine.engine import LearnerEngine
from gspo_services.shared.runtime.lifecycle import leave
from tests.support.learner.learner_worker import settings
from tests.support.learner.trained import train
from tests.support.learner.training_groups import write_model_and_groups
from tests.support.loss.sequences import load_groups

STEPS = 8
RATES = (1e-4, 1e-3)
FACTORS = (1.0, 0.1, 0.0)


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        write_model_and_groups(Path(directory))
        print(f"| learning rate | factor | changed after 1 to {STEPS} steps |\n|---|---|---|")
        for rate in RATES:
            for factor in FACTORS:
                print(f"| {rate:g} | {factor:g} | {' '.join(_changed(Path(directory), rate, factor))} |", flush=True)


def _changed(directory: Path, rate: float, factor: float) -> list[str]:
    groups = load_groups(directory / "groups.npz")
    members = [member for group in groups for member in group.sequences]
    without = [member.with_advantages(np.zeros(member.num_tokens, dtype=np.float32)) for member in members]
    packed = pack(without, policy_version=1)
    options = {"zero_stage": 1, "warmup_steps": 0, "weight_decay": 0.0, "adam_eps": 1e-8, "betas": (0.9, 0.95)}
    engine = LearnerEngine.create(directory / "model", settings(learning_rate=rate, router_rate_factor=factor, **options))
    start, found = engine.logprobs(packed).experts, []
    assert start is not None
    for _ in range(STEPS):
        train(engine, groups, policy_version=1)
        picks = engine.logprobs(packed).experts
        assert picks is not None
        found.append(f"{changed_share(picks, start, packed.mask_T):.1%}")
    return found


if __name__ == "__main__":
    main()
    leave(0)
