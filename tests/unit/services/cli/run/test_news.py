"""What the brokers of a run write down is told once, whichever of them it is about."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

from gspo_services.cli.run.display import Display
from gspo_services.cli.run.news import News
from gspo_services.shared.runtime.console import PlainConsole
from gspo_services.shared.settings import Settings, override_settings
from tests.support.cli.statuses import a_child, a_status


def write(path: Path, *rows: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")


async def test_drops_of_every_broker_are_told_and_each_batch_counts_once(tmp_path: Path) -> None:
    settings = override_settings(Settings(), [f"run.directory={tmp_path}", "broker.num_brokers=2"])
    output = StringIO()
    batch = {"event": "batch", "batch": 0, "time_s": 1.0, "length/mean": 3.0}
    write(tmp_path / "metrics.jsonl", {**batch, "line": 1})
    news = News(settings)
    status = a_status(batches_checkpointed=0)
    with Display(PlainConsole(file=output, width=200), "runs/x", look="plain") as display:
        await news.bring(display, status, [], 0.0)
        for directory in (tmp_path, tmp_path / "broker-1"):
            dropped = {"event": "dropped", "line": 3, "reason": "stale"}
            write(directory / "metrics.jsonl", {**batch, "line": 2, "again": True}, dropped)
        await news.bring(display, status, [], 1.0)
        await news.bring(display, status, [], 2.0)
    assert output.getvalue().splitlines() == [
        "[   1.0 s] batch 0 was trained again after a restart",
        "[   1.0 s] ! 2 groups were dropped: stale (2 in all)",
    ]


def test_the_table_has_a_row_for_each_broker_and_says_which_does_not_answer() -> None:
    output = StringIO()
    groups = {"open": 2, "complete": 1}
    brokers = [{"broker": 0, "answers": True, "batches_trained": 3, "groups": groups}, {"broker": 1, "answers": False}]
    console = PlainConsole(file=output, width=120, force_terminal=True, color_system=None)
    with Display(console, "runs/x", look="live") as display:
        display.show(a_status(brokers=brokers), [a_child("broker"), a_child("broker-1")], 1.0)
    text = output.getvalue()
    assert "batch 3, 2 groups open, 1 ready" in text
    assert "does not answer" in text
