"""What `gspo run` shows: statuses of processes and of the run."""

from pathlib import Path
from typing import Any

from gspo_services.cli.run.supervisor import Child, ProcessSpec


def a_child(name: str, state: str = "running") -> Child:
    spec = ProcessSpec(name=name, module="m", arguments=(), stop_order=0, grace_s=1.0)
    return Child(spec=spec, log_path=Path("x"), state=state)


def a_status(**changes: Any) -> dict[str, Any]:
    status = {
        "batches_trained": 3, "batches_total": 60, "policy_version": 4, "train_reward": 0.5, "eval_reward": None,
        "eval_policy_version": None, "lag_mean": 0.25, "lag_max": 1, "tokens_per_s": 812.4, "stopping": "", "error": "",
        "waiting_for": "batch 3: 5 of 8 groups",
        "groups": {"open": 3, "complete": 5, "dropped": 1, "filtered": 0, "quarantined": 0},
        "rollouts": [
            {"peer": "rollout-0", "status": "serving", "policy_version": 4, "leases": 64},
            {"peer": "rollout-1", "status": "quarantined", "policy_version": 0, "leases": 0},
        ],
    }  # fmt: skip
    return {**status, **changes}
