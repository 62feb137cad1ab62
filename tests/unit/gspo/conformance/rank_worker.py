"""One rank of a data-parallel step: its micro-batches, with gradients and losses summed over the ranks by gloo."""

from __future__ import annotations

import json
import os
from pathlib import Path
from random import Random

import torch
import torch.distributed

from gspo.model.micro_batches import plan_micro_batches
from tests.support.loss.gspo_copies import GSPO
from tests.support.loss.loss_cases import Step, pack, random_step
from tests.unit.gspo.conformance.properties import EMPTY, F64, UNITS

SEEDS = range(12)


def step_of(seed: int) -> Step:
    return random_step(Random(seed))


def run_rank(folder: Path, rank: int, num_ranks: int) -> None:
    """Write the sums that this rank saw to rank-<rank>.json."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(folder / "store"), num_ranks)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    results = {}
    for seed in SEEDS:
        step = step_of(seed)
        lengths = [len(s.mask) for s in step.sequences]
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        unit = UNITS[seed % 3]
        loss, gradient = torch.zeros((), dtype=F64), torch.zeros(sum(lengths), dtype=F64)
        for members in plan_micro_batches(lengths, 16, num_ranks)[rank]:
            flat = pack([step.sequences[i] for i in members] or [EMPTY], F64)
            output = step.loss(flat, unit, GSPO)
            loss += output.loss.detach()
            for i, part in zip(members, flat.gradient(output).split([lengths[i] for i in members]), strict=True):
                gradient[starts[i] : starts[i] + lengths[i]] += part
        torch.distributed.all_reduce(loss)
        torch.distributed.all_reduce(gradient)
        results[seed] = {"loss": loss.item(), "gradient": gradient.tolist()}
    (folder / f"rank-{rank}.json").write_text(json.dumps(results), encoding="utf-8")
    torch.distributed.destroy_process_group()
