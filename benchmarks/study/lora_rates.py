"""The learning rate of adapters, compared with that of all weights, on the demo's task and model.

python -m benchmarks.study.lora_rates --model models/tiny --batches 20 all:2e-4 8:2e-3:attention,experts

Each run is one process with one thread: sampling, advantages, clip range and loss are those of ``benchmarks.study``, the
adapters those of the learner (``gspo.model.lora``), and rollouts sample with the merged weights. There is no SGLang and no
network. The batches are the demo's: 32 groups of 8, 4 optimizer steps, versions up to 2 old.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.study.config import RunConfig
from benchmarks.study.learner import Learner
from benchmarks.study.run import batches
from gspo.model.lora import LoraPlan, adapted_weights, inject_lora, is_lora, merged, plain_name
from gspo.model.policy import load_policy

ALPHA = 32.0


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What one run trains, and how fast."""

    name: str
    learning_rate: float
    plan: LoraPlan | None
    """None: all weights."""

    @classmethod
    def parse(cls, text: str) -> Trial:
        """``all:RATE`` or ``RANK:RATE:TARGET,TARGET``. Raises: ValueError."""
        rank, rate, *targets = text.split(":")
        if rank == "all":
            return cls(name="all weights", learning_rate=float(rate), plan=None)
        (names,) = targets
        plan = LoraPlan(rank=int(rank), alpha=ALPHA, target_modules=tuple(names.split(",")))
        return cls(name=f"rank {rank}, {names.replace(',', ' and ')}", learning_rate=float(rate), plan=plan)


class AdapterLearner(Learner):
    """The study's learner, of adapters."""

    def __init__(self, model: Any, config: RunConfig, *, plan: LoraPlan) -> None:
        inject_lora(model, plan, seed=config.seed)
        super().__init__(model, config)

    @torch.no_grad()
    def weights(self) -> dict[str, Tensor]:
        adapters, found = adapted_weights(self._model), {}
        for own_name, value in self._model.state_dict().items():
            if not is_lora(own_name):
                name = plain_name(own_name)
                each = adapters.get(name)
                found[name] = value.clone() if each is None else merged(value, each, each.lora_a, each.lora_b)
        return found


def rewards(trial: Trial, model_dir: Path, *, num_batches: int, seed: int) -> dict[int, float]:
    """Held-out rewards by the number of batches trained before."""
    config = RunConfig(
        task="arithmetic",
        seed=seed,
        num_batches=num_batches,
        num_sequences=256,
        learning_rate=trial.learning_rate,
        lag=2,
        lag_kind="uniform",
        clip_form="widen",
    )
    learner = Learner if trial.plan is None else partial(AdapterLearner, plan=trial.plan)
    run = batches(model_dir, config, model=load_policy(model_dir, torch.float32), make_learner=learner)
    return {int(record["batch"]): record["eval"] for record in run if "eval" in record}


def main() -> int:
    """Run the trials and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.study.lora_rates", description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/tiny"), help="the model of `gspo model tiny`")
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("trials", nargs="+", type=Trial.parse, metavar="all:RATE|RANK:RATE:TARGETS")
    options = parser.parse_args()
    for index, trial in enumerate(options.trials):
        began = time.process_time()
        found = rewards(trial, options.model, num_batches=options.batches, seed=options.seed)
        if index == 0:
            head = "".join(f" {batch} |" for batch in found)
            print(f"| trained | learning rate | CPU s |{head}\n|---|---|---|{'---|' * len(found)}")
        cells = "".join(f" {reward:.2f} |" for reward in found.values())
        print(f"| {trial.name} | {trial.learning_rate:g} | {time.process_time() - began:.0f} |{cells}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
