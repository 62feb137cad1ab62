"""What the broker of a run writes down is told once."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

from gspo_services.cli.run.display import Display
from gspo_services.cli.run.news import News
from gspo_services.shared.runtime.console import PlainConsole
from gspo_services.shared.settings import Settings, override_settings
from tests.support.cli.statuses import a_status


def write(path: Path, *rows: dict[str, Any]) -> None:
    with path.open("a") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")


async def test_drops_are_told_once_and_what_was_there_before_is_no_news(tmp_path: Path) -> None:
    settings = override_settings(Settings(), [f"run.directory={tmp_path}"])
    output = StringIO()
    batch = {"event": "batch", "batch": 0, "time_s": 1.0, "length/mean": 3.0}
    dropped = {"event": "dropped", "reason": "stale"}
    write(tmp_path / "metrics.jsonl", {**batch, "line": 1}, {**dropped, "line": 2})
    news = News(settings)
    status = a_status(batches_checkpointed=0)
    with Display(PlainConsole(file=output, width=200), "runs/x", look="plain") as display:
        await news.bring(display, status, [], 0.0)
        write(
            tmp_path / "metrics.jsonl", {**batch, "line": 3, "again": True}, {**dropped, "line": 4}, {**dropped, "line": 5}
        )
        await news.bring(display, status, [], 1.0)
        await news.bring(display, status, [], 2.0)
    assert output.getvalue().splitlines() == [
        "[   1.0 s] batch 0 was trained again after a restart",
        "[   1.0 s] ! 2 groups were dropped: stale (3 in all)",
    ]
