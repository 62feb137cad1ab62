"""Any metric of metrics.jsonl: what was trained again, what is damaged, what comes later."""

import json
from pathlib import Path

import pytest

from gspo_services.broker.store import LEDGER_FILE
from gspo_services.runs.view.metric_columns import MetricColumns
from tests.support.processes.small_run import write_small_run
from tests.support.runs.learning_lines import a_batch, an_evaluation
from tests.support.view.served import Serve, answer, refused


def test_the_last_training_of_a_batch_counts_and_neighbours_are_averaged() -> None:
    columns = MetricColumns()
    lines = [a_batch(0, loss=1.0), a_batch(1, loss=2.0), a_batch(1, loss=4.0), a_batch(2, loss=8.0), an_evaluation(2, 0.5)]
    columns.take([{**line, "line": at, "time": 100.0 + at} for at, line in enumerate(lines, 1)])
    assert columns.plain("loss", 0, 9, 10) == {"name": "loss", "batch": [0, 1, 2], "values": [1.0, 4.0, 8.0]}
    assert columns.plain("loss", 1, 2, 10)["values"] == [4.0, 8.0]
    assert columns.plain("loss", 0, 9, 2) == {"name": "loss", "batch": [0, 2], "values": [2.5, 8.0]}
    assert columns.plain("eval/reward", 0, 9, 10) == {"name": "eval/reward", "batch": [2], "values": [0.5]}
    assert columns.plain("time", 0, 9, 10)["values"] == [101.0, 103.0, 104.0], "an evaluation's time is no batch's"
    assert columns.plain("gone", 0, 9, 10)["values"] == []


def test_what_is_no_number_is_left_out() -> None:
    columns = MetricColumns()
    columns.take(
        [a_batch(0, text="x", flag=True, much=1e300), {"event": "batch", "batch": "0", "loss": 1.0}, {"event": "dropped"}]
    )
    assert {"text", "flag", "much", "loss", "line", "batch"} & set(columns.names) == set()
    assert "entropy/all" in columns.names


async def test_a_damaged_line_costs_itself_where_there_is_no_ledger(tmp_path: Path, serve: Serve) -> None:
    run = tmp_path / "run"
    write_small_run(run)
    client = await serve(run)
    whole = await answer(client, "/api/runs/run/metrics?name=time_s&name=num_tokens")
    assert [each["batch"] for each in whole["columns"]] == [[0, 1, 2], [0, 1, 2]]
    assert "train/reward" in whole["names"]
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines()
    hit = next(at for at, line in enumerate(lines) if json.loads(line).get("batch") == 0 and "num_tokens" in line)
    path.write_text("\n".join([*lines[:hit], "{" + lines[hit], *lines[hit + 1 :]]) + "\n")
    (run / LEDGER_FILE).unlink()
    rest = await answer(client, "/api/runs/run/metrics?name=num_tokens")
    assert rest["columns"][0]["batch"] == [1, 2]
    assert "is no run directory" in await refused(client, "/api/runs/run/completions", 409)


@pytest.mark.parametrize(
    ("query", "error"),
    [("first=x", "first is 'x': expected a number"), ("&".join(["name=a"] * 17), "17 metrics: at most 16 at once")],
)
async def test_what_cannot_be_asked_is_named(query: str, error: str, tmp_path: Path, serve: Serve) -> None:
    write_small_run(tmp_path / "run")
    assert await refused(await serve(tmp_path / "run"), f"/api/runs/run/metrics?{query}", 400) == error


async def test_settings_are_those_that_are_no_places(tmp_path: Path, serve: Serve) -> None:
    write_small_run(tmp_path / "run")
    client = await serve(tmp_path / "run")
    found = (await answer(client, "/api/runs/run/settings"))["settings"]
    assert found["run.num_batches"] == "3"
    assert "run.directory" not in found
    (tmp_path / "run" / "settings.json").unlink()
    assert "settings.json: missing" in await refused(client, "/api/runs/run/settings", 400)
