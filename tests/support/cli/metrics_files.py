"""Lines of metrics.jsonl."""

import json
from pathlib import Path
from typing import Any


def a_batch(index: int, **changes: Any) -> dict[str, Any]:
    return {
        "event": "batch", "batch": index, "reward_mean": index / 10, "lag/all": 0.5, "lag/max": 1, "clip_fraction/all": 0.25,
        "mismatch_sigma": 0.02, "entropy/all": 0.7, "tokens_per_s": 100.0 * (index + 1), "optimizer_steps": 4.0,
        "time_s": 30.0 + index, **changes,
    }  # fmt: skip


def an_eval(batch: int, reward: float, version: int = 1) -> dict[str, Any]:
    return {"event": "eval", "batch": batch, "policy_version": version, "eval/reward": reward}


def recorded(directory: Path, *rows: dict[str, Any]) -> Path:
    """A run's directory with these lines in its metrics.jsonl."""
    numbered = ({"line": number, **row} for number, row in enumerate(rows, start=1))
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in numbered))
    return directory
