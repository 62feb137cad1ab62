"""Runs under torchrun: how much memory a rank takes while its learner starts, and what weights it then has.

python -m tests.support.starts.start_worker PLAN.json; the plan is a list of starts, see ``Start``.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch

from gspo.model.policy import load_policy
from gspo.model_files import loading
from gspo.model_files.configuration import read_config
from gspo_services.broker.upkeep import return_freed_memory
from gspo_services.learner.engine.engine import LearnerEngine
from gspo_services.learner.engine.partitioned_loading import placement_of
from gspo_services.learner.engine.process_group import init_distributed
from gspo_services.learner.weights import DTYPES
from gspo_services.shared.runtime.lifecycle import leave
from tests.support.learner.gpu_worker import policy_gradient, random_row
from tests.support.learner.learner_worker import settings

M_MMAP_THRESHOLD: Final = -3
"""Of mallopt (malloc.h)."""
STEP_TOKENS: Final = 8
VOCABULARY: Final = 64
"""Token ids below it are in every model."""


@dataclass(frozen=True)
class Start:
    """One learner, which starts from a model and ends."""

    model: str
    """A folder; {rank} in it is the rank."""
    settings: dict[str, Any] = field(default_factory=dict)
    with_optimizer: bool = True
    with_step: bool = False
    """One step on a short sequence, after which every gradient and moment has been written. Freed memory goes back to the
    system as soon as it is free, so that what is resident is what is held."""
    by_transformers: bool = False
    """Loaded by from_pretrained, as a model is whose class this project's loader does not know."""


def resident_bytes(key: str = "VmRSS") -> int:
    """What the kernel says that this process has in memory: now, or at most since ``forget_peak`` (VmHWM)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def forget_peak() -> None:
    """Let VmHWM begin at what there is now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


@contextmanager
def patched_loader() -> Iterator[None]:
    """Inside, no model can be read range by range."""
    with mock.patch.object(loading, "_wanted", return_value=None):
        yield


def free_at_once() -> None:
    """glibc gives a block back when it is freed if it was mapped alone; let it map those from 64 KiB on alone."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)


def run(start: Start) -> dict[str, Any]:
    chosen, model_dir = settings(**start.settings), Path(start.model.format(rank=os.environ.get("RANK", "0")))
    init_distributed("cpu")
    placement = placement_of(chosen, read_config(model_dir))
    forget_peak()
    before = resident_bytes()
    with patched_loader() if start.by_transformers else nullcontext():
        model = load_policy(model_dir, DTYPES[chosen.learner.dtype], placement)
    found: dict[str, Any] = {"loading": resident_bytes("VmHWM") - before, "loaded": resident_bytes() - before}
    if start.with_optimizer:
        engine = LearnerEngine.from_model(model, chosen, model_dir=model_dir)
        found |= {"starting": resident_bytes("VmHWM") - before, "started": resident_bytes() - before}
        found["digest"] = engine.weights_digest()
        if start.with_step:
            engine.train_mini_batch([random_row(1, STEP_TOKENS, VOCABULARY)], policy_gradient)
            return_freed_memory()
            found["trained"] = resident_bytes() - before
    return found


def main() -> None:
    torch.set_num_threads(1)
    plan = Path(sys.argv[1])
    results = []
    for content in json.loads(plan.read_text(encoding="utf-8")):
        start = Start(**content)
        if start.with_step:
            free_at_once()
        try:
            results.append(run(start))
        except ValueError as error:
            results.append({"error": f"{type(error).__name__}: {error}"})
    plan.with_suffix(f".{os.environ.get('RANK', '0')}.out").write_text(json.dumps(results), encoding="utf-8")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
    leave(0)
