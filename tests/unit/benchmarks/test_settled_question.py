"""Question f of the study: its tables, before any run is there and with a few."""

from pathlib import Path

from benchmarks.study.questions import settled
from benchmarks.study.questions.grid import Cell
from benchmarks.study.reporting.plots import draw_all
from benchmarks.study.reporting.settled import by_lag, comparison, tuning
from benchmarks.study.reporting.summary import RunSummary, summarise_run
from benchmarks.study.results import Results
from benchmarks.study.run_record import RunRecord


def a_summary(rewards: list[float], *, clipped: float) -> RunSummary:
    rows = [{"batch": 5.0 * index, "eval": reward, "clip": clipped} for index, reward in enumerate(rewards)]
    for row in rows[:-1]:
        row |= {"tokens": 1000.0, "cpu_train_s": 2.0, "cpu_reference_s": 1.0, "clip_lag_0": clipped, "width_lag_0": 0.01}
        row |= {f"clip_lag_{lag}": clipped + 0.01 * lag for lag in range(1, 9)}
    return summarise_run(RunRecord("x", {"num_batches": 10, "eval_every": 5}, rows))


def some_results() -> Results:
    made = {
        (settled.CALIBRATED, 0): a_summary([0.2, 0.6, 0.8], clipped=0.1),
        (settled.CALIBRATED, 1): a_summary([0.2, 0.5, 0.7], clipped=0.2),
        (settled.TRUNCATED, 0): a_summary([0.2, 0.5, 0.7], clipped=0.1),
        (settled.TRUNCATED, 1): a_summary([0.2, 0.4, 0.6], clipped=0.1),
        (settled.TRUNCATED, 2): a_summary([0.2, 0.9, 0.9], clipped=0.1),
    }
    grid = [Cell("f", row, column, config) for row, column, config in settled.comparison()]
    found = {(cell.row, cell.config.seed): cell.config.run_id for cell in grid}
    return Results({found[key]: summary for key, summary in made.items()}, grid)


def rows_of(table: str) -> dict[str, list[str]]:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {line[0]: line[1:] for line in lines}


def test_every_arm_has_its_row_before_any_run_is_there() -> None:
    for table in (tuning, comparison, by_lag):
        rows = rows_of(table(Results({}, [])))
        assert list(rows) == list(settled.ARMS)
        assert {cell.strip("*") for row in rows.values() for cell in row} <= {"-", "0"}


def test_arms_are_compared_by_start_model_and_clipping_is_shown_by_lag(tmp_path: Path) -> None:
    results = some_results()
    rows = rows_of(comparison(results))
    num, reward, difference, *controls, at_the_end, collapsed, seconds = rows[settled.CALIBRATED]
    assert (num, reward[:5], controls, at_the_end[:4], collapsed) == ("2", "0.650", ["-", "-"], "0.65", "0/2")
    # Not the 0.65 less the 0.667 of all: seed 2 has no partner.
    assert difference.startswith("**+0.100")
    assert seconds == "6.0"
    clipped = rows_of(by_lag(results))[settled.CALIBRATED]
    assert (clipped[0], clipped[8], clipped[9]) == ("15 %", "23 %", "8")
    assert [path.name for path in draw_all(results, [], tmp_path)] == ["settled.png"]
