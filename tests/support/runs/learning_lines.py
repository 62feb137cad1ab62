"""Lines of metrics.jsonl for the watch over learning: recorded ones, and a healthy run's with some measures changed."""

import json
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parents[2] / "unit/services/shared/learning/recorded"


def recorded(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RECORDED / f"{name}.jsonl").read_text().splitlines()]


def a_batch(index: int, **measures: Any) -> dict[str, Any]:
    """A line of a healthy batch, with some measures changed."""
    usual = {
        "reward_mean": 0.5, "reward_std": 0.5, "signal_sequences/all": 48, "sequences/all": 64, "groups/all": 8,
        "num_trajectories": 64, "length/cut_off": 0.0, "length/mean": 9.0, "entropy/all": 0.5, "clip_fraction/all": 0.2,
        "mismatch_sigma": 1e-6, "learning_rate": 1e-6, "grad_norm_max": 1.0, "ratio_min/all": 0.99, "ratio_max/all": 1.01,
        "lag/all": 1.0, "optimizer_steps": 4, "num_resting_tasks": 0,
    }  # fmt: skip
    return {"event": "batch", "batch": index, **usual, **measures}


def an_evaluation(batch: int, reward: float) -> dict[str, Any]:
    return {
        "event": "eval", "batch": batch, "policy_version": batch + 1, "eval/reward": reward, "eval/reward_error": 0.03,
        "num_finished": 128,
    }  # fmt: skip
