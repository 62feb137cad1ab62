"""A whole run on one GPU: broker, learner and SGLang beside each other, and what its metrics say.

python -m tests.gpu.half_hour.run CONFIG DIRECTORY [SECTION.KEY=VALUE ...]; both halves share the device.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from gspo.runs import Run
from tests.gpu.half_hour.memory import MemoryWatch

ENGINE_ARGUMENTS = [
    "--attention-backend", "triton", "--sampling-backend", "pytorch", "--moe-runner-backend", "triton",
    "--cuda-graph-backend-prefill=disabled",
]  # fmt: skip
"""What needs no compiled attention kernels, and stores experts as they were sent. Graphs of prefill take 41 s to capture."""

MEDIANS = (
    "tokens_per_s", "train_s", "publish_s", "num_tokens", "lag/mean", "mismatch/all", "mismatch_kl/all", "mismatch_sigma",
    "log_ratio_error/all", "clip_fraction/all", "experts_changed/all", "experts_differ/all", "experts_replayed/all",
    "entropy/all", "grad_norm",
)  # fmt: skip


def train(config: Path, directory: Path, settings: list[str]) -> dict[str, Any]:
    """Run it, audit it, and read its metrics. Its output is ours. Raises: CalledProcessError when the run fails."""
    command = [sys.executable, "-m", "gspo_services.cli.main", "run", str(config), "--plain"]
    for setting in [f"run.directory={json.dumps(str(directory))}", *settings]:
        command += ["--set", setting]
    begin = time.monotonic()
    with MemoryWatch(directory) as memory:
        subprocess.run(command, check=True)
    seconds = time.monotonic() - begin
    audit = subprocess.run([sys.executable, "-m", "gspo_services.cli.main", "audit", str(directory)], check=False)
    said = {"seconds": round(seconds, 1), "audit": audit.returncode, "mib": memory.found()}
    return said | summary(directory) | publications(directory)


def released(mib: dict[str, list[int]]) -> bool:
    """Whether each side leaves the other most of the device: at most a tenth of what it had stays with it."""
    learner, server = (
        ("learner, while learner", "learner, while rollout-0"),
        ("server, while rollout-0", "server, while learner"),
    )
    return all(mib[away][1] < 0.1 * mib[here][1] for here, away in (learner, server))


def publications(directory: Path) -> dict[str, float]:
    """Of the learner's versions after the first, the median seconds of each part of a publication."""
    events = [json.loads(line) for line in (directory / "logs" / "learner.log").read_text().splitlines() if line[:1] == "{"]
    published = [event for event in events if event.get("event") == "published"][1:]
    names = [name for name in (published or [{}])[0] if name.endswith("_s")]
    return {name: median(event[name] for event in published) for name in names}


def summary(directory: Path) -> dict[str, Any]:
    """Held-out rewards, and medians over the batches but the first two."""
    run = Run.open(directory)
    batches = run.metrics()
    rewards = [round(evaluation.reward, 3) for evaluation in run.evaluations()]
    found: dict[str, Any] = {"batches": len(batches), "held_out": rewards}
    for name in MEDIANS:
        values = [batch.measures[name] for batch in batches[2:] if name in batch.measures]
        if values:
            found[name] = float(f"{median(values):.4g}")
    return found


if __name__ == "__main__":
    found = train(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
    print(json.dumps(found))
    if "run.colocate=true" in sys.argv and found["mib"] and not released(found["mib"]):
        sys.exit("a side keeps memory of the device that it has given back")
