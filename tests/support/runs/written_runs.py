"""Runs as their metrics.jsonl and settings.json tell of them."""

import json
from pathlib import Path
from typing import Any

from gspo_services.shared.settings.run_settings import write_run_settings
from gspo_services.shared.settings.sections import Learner, Run, Settings


def write_run(
    directory: Path, rewards: list[float], *, seed: int = 0, num_batches: int = 0, time_scale: float = 1.0, **learner: Any
) -> Path:
    """A run that evaluated every second batch: ``rewards`` after 0, 2, 4, ... batches. Batch i has 100 + i tokens and took
    10 seconds times ``time_scale``."""
    directory.mkdir(parents=True)
    trained = 2 * (len(rewards) - 1)
    write_run_settings(
        Settings(run=Run(directory=directory, num_batches=num_batches or trained, seed=seed), learner=Learner(**learner))
    )
    lines: list[dict[str, Any]] = []
    for batch in range(trained + 1):
        time_s = 10.0 * batch * time_scale
        if batch % 2 == 0:
            line = {"event": "eval", "batch": batch, "policy_version": batch + 1, "eval/reward": rewards[batch // 2]}
            lines.append(line | {"num_finished": 8, "num_failed": 0, "time_s": time_s})
        if batch < trained:
            line = {"event": "batch", "batch": batch, "policy_version": batch + 2, "train/reward": batch / trained}
            lines.append(line | {"num_tokens": 100 + batch, "lag/mean": 1.0, "tokens_per_s": 50.0, "time_s": time_s + 10})
    text = "".join(json.dumps({"line": number, **line}) + "\n" for number, line in enumerate(lines, start=1))
    (directory / "metrics.jsonl").write_text(text)
    return directory
