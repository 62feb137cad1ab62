"""What `gspo doctor` reads: pages of metrics and statuses."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from gspo_services.cli.doctor.observe import LedgerState, Observation, Page
from gspo_services.shared.settings.sections import Learner, Rollout, Run, Settings

SETTINGS = Settings(
    run=Run(directory=Path("runs/x"), num_batches=60),
    rollout=Rollout(num_servers=2),
    learner=Learner(weights_endpoint="tcp://127.0.0.1:7003"),
)
GIB = 1 << 30


def a_rollout(name: str, **changes: Any) -> dict[str, Any]:
    return {"peer": name, "status": "serving", "policy_version": 4, "leases": 64, "silent_s": 0.4, "metrics": {}} | changes


def a_status(**changes: Any) -> dict[str, Any]:
    return {
        "batches_trained": 3, "batches_assembled": 3, "batches_total": 60, "policy_version": 4, "stopping": "", "error": "",
        "finished": False, "waiting_for": "20 more complete groups: 12 of 32 are ready, 128 trajectories under way, 4 free",
        "groups": {"open": 3, "complete": 12, "dropped": 0, "filtered": 0, "quarantined": 0}, "dropped": {},
        "filtered": {"groups": 0, "limit": 0}, "learner": "learner",
        "rollouts": [a_rollout("rollout-0"), a_rollout("rollout-1")], "lag_mean": 0.5, "lag_max": 1, "quiet_s": 10.0,
    } | changes  # fmt: skip


def a_page(ready: bool | None = True, text: str = "ready") -> Page:
    return Page(url="http://127.0.0.1:9", ready=ready, text=text)


A_LEDGER = LedgerState(batches=3, trained=3, version=4, groups={"batched": 96})


def batches_at(*times_s: float) -> list[dict[str, Any]]:
    """Rows of consecutive batches that were recorded then."""
    return [{"batch": index, "time_s": time_s, "train_s": 5.0, "publish_s": 1.0} for index, time_s in enumerate(times_s)]


HEALTHY = Observation(
    settings=SETTINGS,
    status=a_status(),
    no_status="",
    turned_away=False,
    pages={name: a_page() for name in ("broker", "learner", "rollout-0", "rollout-1")},
    logs={},
    ledger=A_LEDGER,
    no_ledger="",
    batches=batches_at(60.0, 75.0, 90.0),
    free_bytes={"run.directory (runs/x)": (50 * GIB, 100 * GIB)},
)


def without_broker(**changes: Any) -> Observation:
    pages = {name: a_page(None, "connection refused") for name in HEALTHY.pages}
    silence = {"status": None, "no_status": "tcp://127.0.0.1:7002: no answer within 8 s", "pages": pages}
    return replace(HEALTHY, **(silence | changes))
