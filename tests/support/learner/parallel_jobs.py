"""Runs jobs of ``tests.support.learner.parallel_worker`` in processes, and compares their checkpoints and exports.

An optimizer's first moment after one step from nothing is (1 - beta) of the gradient: a checkpoint then holds the gradient
of every parameter, under names that are the same in all layouts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from tests.support.learner.ranks import Ranks

RESUMED_STEPS = 5
JOB_FIELDS = (
    "resume",
    "steps",
    "save_after",
    "export",
    "unwritable_on",
    "replay",
    "reported",
    "model",
    "groups",
    "penalties",
    "count_saved",
    "in_background",
)
Results = list[dict[str, dict[str, Any]]]


def run_jobs(work: Path, num_ranks: int, jobs: Sequence[dict[str, Any]], *, accelerator: str = "cpu") -> Results:
    """Run the jobs on ``num_ranks`` processes. Returns, by rank, the results by job name."""
    plan = work / f"plan-{num_ranks}-{jobs[0]['name']}.json"
    plan.write_text(json.dumps(jobs), encoding="utf-8")
    with Ranks(
        "tests.support.learner.parallel_worker", [str(plan), str(work)], num_ranks, plan, accelerator=accelerator
    ) as ranks:
        ranks.finish(900)
    results: Results = [
        json.loads(plan.with_suffix(f".{rank}.out").read_text(encoding="utf-8")) for rank in range(num_ranks)
    ]
    for name in results[0]:
        # In whatever layout: what the ranks have adds up to the version that rank 0 gathers.
        versions = {digest for each in results for digest in each[name].get("versions", [])}
        assert len(versions) <= 1, f"{name}: {versions}"
    return results


def job(name: str, **content: Any) -> dict[str, Any]:
    settings = {key: content.pop(key) for key in list(content) if key not in JOB_FIELDS}
    return {"name": name, "settings": settings, **content}


def gradient_job(name: str, **settings: Any) -> dict[str, Any]:
    return job(name, save_after=1, **{"max_grad_norm": 0.0, **settings})


def checkpoint(work: Path, name: str) -> Path:
    (found,) = (work / name).glob("version-*")
    return found


def state(work: Path, name: str) -> dict[str, Tensor]:
    """A checkpoint's state of every parameter, the experts' parts joined."""
    parts: dict[str, list[tuple[int, Tensor]]] = {}
    for path in checkpoint(work, name).glob("engine/*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a mapping
                parts.setdefault(key, []).append((int(file.metadata()["first_row"]), file.get_tensor(key)))
    return {
        key: torch.cat([tensor for _, tensor in sorted(found, key=lambda part: part[0])]) for key, found in parts.items()
    }


# 2 layers of attention (q, k, v, o, two norms), two norms, a router and three projections; embeddings, head, last norm.
TINY_PARAMETERS = 2 * (4 + 2 + 2 + 1 + 3) + 3


def require_gradients(
    work: Path,
    name: str,
    reference: str,
    scale: float = 1.0,
    *,
    tolerance: float = 1e-5,
    num_parameters: int = TINY_PARAMETERS,
) -> None:
    """Every parameter's gradient equals that of ``reference`` times ``scale``, and none is 0."""
    found, expected = state(work, name), state(work, reference)
    assert set(found) == set(expected)
    gradients = [key for key in expected if key.endswith("/exp_avg")]
    assert len(gradients) == num_parameters
    for key in gradients:
        norm = expected[key].norm() * scale
        assert norm > 0, key
        assert (found[key] - expected[key] * scale).norm() <= tolerance * norm, (name, key)


def require_same_future(ours: dict[str, Any], uninterrupted: dict[str, Any], steps: int) -> None:
    assert len(ours["losses"]) == steps
    assert min(ours["norms"]) > 0.1, "nothing is learnt"
    assert min(abs(a - b) for a, b in pairwise(ours["losses"])) > 1e-4, "all steps are alike"
    assert ours["losses"] == pytest.approx(uninterrupted["losses"][-steps:], abs=1e-5, rel=0)
    assert ours["norms"] == pytest.approx(uninterrupted["norms"][-steps:], rel=1e-5)
    assert ours["rates"] == uninterrupted["rates"][-steps:]


def require_weights(work: Path, ours: str, others: str) -> None:
    """The weights equal those of the other job, to a thousandth of what training changed."""
    found, expected = (load_file(work / f"{name}.safetensors") for name in (ours, others))
    before = load_file(work / "model" / "model.safetensors")
    assert set(found) == set(expected) == set(before)
    for name, tensor in expected.items():
        change = (tensor - before[name]).norm()
        assert change > 1e-4, name
        assert (found[name] - tensor).norm() <= 1e-3 * change, name
