"""The display of a run while it runs."""

from io import StringIO
from pathlib import Path
from typing import Any

from services.cli.console import PlainConsole
from services.cli.run.display import Display, number
from services.cli.run.supervisor import Child, ProcessSpec


def a_child(name: str, state: str = "running") -> Child:
    spec = ProcessSpec(name=name, module="m", arguments=(), stop_order=0, grace_s=1.0)
    return Child(spec=spec, log_path=Path("x"), state=state)


def a_status(**changes: Any) -> dict[str, Any]:
    status = {
        "batches_trained": 3, "batches_total": 60, "policy_version": 4, "train_reward": 0.5, "eval_reward": None,
        "eval_policy_version": None, "lag_mean": 0.25, "lag_max": 1, "tokens_per_s": 812.4, "stopping": "", "error": "",
        "waiting_for": "batch 3: 5 of 8 groups", "groups": {"open": 3, "complete": 5, "dropped": 1, "set_aside": 0},
        "rollouts": [
            {"peer": "rollout-0", "status": "serving", "policy_version": 4, "leases": 64},
            {"peer": "rollout-1", "status": "quarantined", "policy_version": 0, "leases": 0},
        ],
    }  # fmt: skip
    return {**status, **changes}


def shown(*snapshots: dict[str, Any] | None, terminal: bool = False, plain: bool = False) -> str:
    output = StringIO()
    console = PlainConsole(file=output, width=120, force_terminal=terminal, color_system=None)
    with Display(console, "runs/x", plain=plain) as display:
        for elapsed, status in enumerate(snapshots):
            display.show(status, [a_child("broker"), a_child("rollout-0"), a_child("rollout-1", "starting")], float(elapsed))
    return output.getvalue()


def test_off_a_terminal_there_is_one_line_for_each_change() -> None:
    lines = shown(None, None, a_status(), a_status(tokens_per_s=1.0), a_status(batches_trained=4)).splitlines()
    assert lines == [
        "[   0.0 s] starting: broker running, rollout-0 running, rollout-1 starting",
        "[   2.0 s] batch 3/60  version 4  reward 0.500  held-out -  lag 0.250  812 tokens/s  rollouts serving 1  "
        "batch 3: 5 of 8 groups",
        "[   4.0 s] batch 4/60  version 4  reward 0.500  held-out -  lag 0.250  812 tokens/s  rollouts serving 1  "
        "batch 3: 5 of 8 groups",
    ]


def test_on_a_terminal_there_is_a_table_of_the_run_and_its_processes() -> None:
    text = shown(a_status(), terminal=True)
    for part in ("3/60", "0.500 training", "- held out", "3 open, 5 ready", "1 dropped", "batch 3: 5 of 8 groups"):
        assert part in text
    assert "serving, version 4, 64 episodes" in text
    assert "quarantined, version 0, 0 episodes" in text


def test_plain_lines_can_be_asked_for_on_a_terminal() -> None:
    assert shown(a_status(), terminal=True, plain=True).startswith("[   0.0 s] batch 3/60")


def test_an_unknown_number_is_a_dash() -> None:
    assert [number(value) for value in (None, float("nan"), 0.0, 1.23456)] == ["-", "-", "0.000", "1.235"]
