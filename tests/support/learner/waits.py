"""What makes the host wait for a claimed device: cases for ``waits_worker``, and what its counts mean."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.support.learner.ranks import Ranks

WORKER = "tests.support.learner.waits_worker"
Counts = dict[str, int]
"""How often the host waited, or host and device were mixed, by kind and line."""


@dataclass(frozen=True)
class Case:
    """One engine, trained with each of the objectives."""

    name: str
    layers: int = 2
    learner: dict[str, Any] = field(default_factory=dict)
    """Settings of this section."""
    lora: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    """Other settings of the engine."""
    objectives: dict[str, dict[str, Any]] = field(default_factory=lambda: {"default": {}})
    batch: dict[str, Any] = field(default_factory=dict)
    """``episodes``: each of two sequences; ``dump``; ``adaptive``: the clip. The rest are settings of advantages."""
    warm: bool = False
    """Train a batch before the counting: a library waits in the first one."""
    states: bool = False
    """Also save, load, serve, and leave the device if the engine can."""
    publishes: bool = False
    """Also copy a version."""
    plants: tuple[str, ...] = ()
    """Faults of a layer, one batch with each: see ``waits_worker.PLANTS``."""


@dataclass(frozen=True)
class Waits:
    """The waits of one objective, by what they go with."""

    per_micro_batch: Counts
    """Those that are more with more micro-batches."""
    per_step: Counts
    per_batch: Counts
    mixes: Counts

    @classmethod
    def of(cls, found: Mapping[str, Counts]) -> Waits:
        """Compare batches of as many steps with more micro-batches ("fine"), and of two steps more ("steps")."""
        batch, fine, steps = (Counter(waits(found[name])) for name in ("batch", "fine", "steps"))
        by_batch = {line: 2 * batch[line] - steps[line] for line in batch | steps}
        by_step = {line: (steps[line] - batch[line]) / 2 for line in batch | steps}
        more = {line: fine[line] - batch[line] for line in batch | fine}
        mixes = Counter({line: count for each in found.values() for line, count in each.items() if line not in waits(each)})
        return cls(_some(more), _some(by_step), _some(by_batch), dict(mixes))


def waits(counts: Counts) -> Counts:
    """Those of the kinds that wait."""
    return {line: count for line, count in counts.items() if line.startswith("waits")}


def _some(counts: Mapping[str, float]) -> Counts:
    # Fractions would go with micro-batches, of which there are more with more steps.
    return {line: int(count) for line, count in counts.items() if count}


def planted_at(module: str, fault: str) -> str:
    """The line of a fault in the table of a worker's module, as FILE:LINE."""
    file = f"{module.replace('.', '/')}.py"
    start = f'"{fault}": lambda'
    lines = (Path(__file__).parents[3] / file).read_text(encoding="utf-8").splitlines()
    return f"{file}:{next(number for number, line in enumerate(lines, 1) if line.lstrip().startswith(start))}"


def counted(work: Path, cases: Sequence[Case], timeout_s: float) -> dict[str, dict[str, dict[str, Counts]]]:
    """Run the cases in one process. Returns by case, by objective (or "start", "states", "plants") and by phase."""
    plan = work / "plan.json"
    plan.write_text(json.dumps([asdict(case) for case in cases]), encoding="utf-8")
    with Ranks(WORKER, [str(plan)], 1, plan) as ranks:
        ranks.finish(timeout_s)
    found: dict[str, dict[str, dict[str, Counts]]] = json.loads(plan.with_suffix(".out").read_text(encoding="utf-8"))
    return found
