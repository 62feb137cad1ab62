"""Runs alone: one step of the learner's model code on a fake GPU, as it is and with a fault of each kind.

python -m tests.support.learner.fake_gpu_worker RESULTS.json; by fault, or "": what was refused where, or what was done.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from gspo.calibration import Calibration, LagCalibration
from gspo.inputs.validation import trusted_values
from gspo.loss import objective_loss
from gspo.model.boundaries import Boundaries
from gspo.model.logprobs import TokenLogProbs
from gspo.model.packing import PackedBatch, pack
from gspo.model.policy import prepare_policy
from gspo.settings import Objective
from gspo.staleness import sequence_lag
from gspo_services.learner.engine.step import micro_batch_loss
from gspo_services.shared.runtime.lifecycle import leave
from tests.gpu.half_hour.shapes import SMALL, moe_config
from tests.support.learner.fake_gpu import GPU, Operations, fake_gpu, moved, own_line
from tests.support.loss.sequences import random_sequence

PLANTS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda states: states,
    "item": lambda states: states * states.abs().max().item(),
    "host": lambda states: states * torch.ones(states.shape[-1], dtype=states.dtype),
    "mask": lambda states: states + states[states > 0].sum(),
    "cpu": lambda states: states.cpu().to(GPU),
}
"""Faults of a layer."""


def loss_fn(calibration: Calibration, packed: PackedBatch, result: TokenLogProbs) -> Tensor:
    with trusted_values():
        lag_S = sequence_lag(1, packed.versions_T, packed.mask_T, packed.sequence_ids_T, packed.num_sequences)
        return objective_loss(
            Objective(), result.logprobs_T, packed.behaviour_T, packed.advantages_T, packed.mask_T, packed.sequence_ids_T,
            packed.turn_ids_T, lag_S=lag_S, sigma=0.1, num_sequences=packed.num_sequences,
            calibration=calibration, entropy_T=result.entropies_T,
        ).loss  # fmt: skip


def step(change: Callable[[Tensor], Tensor]) -> Operations:
    """Packing, the model with two layers, the loss, backward and a fused AdamW."""
    rows = [random_sequence(64, seed, vocab_size=SMALL["vocab_size"]) for seed in range(4)]
    packed = pack([row.with_advantages(np.ones(row.num_tokens, dtype=np.float32)) for row in rows], policy_version=1)
    calibration = LagCalibration().current
    with fake_gpu() as mode:

        def entered(value: Any) -> Any:
            """The same on the host of the fake device."""
            tensors = {name: mode.from_tensor(each) for name, each in vars(value).items() if isinstance(each, Tensor)}
            return replace(value, **tensors)

        model = moved(AutoModelForCausalLM.from_config(moe_config(SMALL, 2), dtype=torch.bfloat16))
        prepare_policy(model, logprob_chunk_tokens=64)
        model.model.layers[0].mlp.register_forward_hook(lambda module, given, states: change(states))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        with Operations() as operations:
            on_device = entered(packed).to(torch.device(GPU, 0))
            inputs = {
                name: getattr(on_device, name) for name in ("input_ids", "position_ids", "targets_T", "temperatures_T")
            }
            result = model(**inputs, cu_seqlens=Boundaries(packed.cu_seqlens), with_entropy=True)
            loss = micro_batch_loss(on_device, result, partial(loss_fn, entered(calibration)))
            loss.backward()
            optimizer.step()
    assert loss.device.type == GPU
    return operations


def main(path: Path) -> None:
    results: dict[str, dict[str, Any]] = {}
    for name, change in PLANTS.items():
        try:
            operations = step(change)
        except RuntimeError as error:
            line = own_line(traceback.extract_tb(error.__traceback__))
            results[name] = {"refused": f"{type(error).__name__} at {line}"}
        else:
            results[name] = {"operations": operations.names, "copies": operations.copies}
    path.write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave(0)
