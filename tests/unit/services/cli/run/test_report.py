"""The table and the plot of a run, from its metrics.jsonl."""

from io import StringIO
from pathlib import Path

from gspo_services.cli.run.report import learning_lines, summary_table
from gspo_services.runs.metrics import column, read_metrics
from gspo_services.shared.runtime.console import PlainConsole
from tests.support.cli.metrics_files import a_batch, an_eval, recorded


def table(directory: Path) -> dict[str, list[str]]:
    """The other columns by the first, as a person reads them."""
    output = StringIO()
    PlainConsole(file=output, width=200).print(summary_table(read_metrics(directory)))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.getvalue().splitlines() if "│" in line]
    return {name: cells for name, *cells in rows}


def test_the_table_shows_first_last_and_best(tmp_path: Path) -> None:
    rows = [a_batch(0), an_eval(0, 0.25), a_batch(1), a_batch(2, reward_mean=0.15), an_eval(3, 0.75), an_eval(3, 0.5, 2)]
    dropped = {"event": "dropped", "reason": "too_old", "num_tokens": [5, 6]}
    shown = table(recorded(tmp_path, *rows, dropped))
    assert shown["held-out reward"] == ["0.25", "0.5", "0.75"]
    assert shown["training reward"] == ["0", "0.15", "0.15"]
    assert shown["tokens/s"] == ["100", "300", "300"]
    assert shown["clip fraction"] == ["0.25", "0.25", ""]
    assert shown["batches trained"] == ["", "3", ""]
    assert shown["optimizer steps"] == ["", "12", ""]
    assert shown["groups dropped"] == ["", "1", ""]
    assert shown["seconds"] == ["", "32", ""]


def test_an_unmeasured_value_is_a_dash_and_a_gap_and_never_zero(tmp_path: Path) -> None:
    rows = [a_batch(0, **{"tokens_per_s": None, "entropy/all": None}), a_batch(1, **{"entropy/all": None})]
    shown = table(recorded(tmp_path, *rows))
    assert shown["tokens/s"] == ["200", "200", "200"]
    assert shown["entropy (nats/token)"] == ["-", "-", "-"]
    assert shown["held-out reward"] == ["-", "-", "-"]
    values = column(read_metrics(tmp_path).batches, "tokens_per_s")
    assert values[0] != values[0]
    assert values[1] == 200.0


def test_the_last_line_says_whether_the_run_learned_and_those_before_it_what_is_wrong(tmp_path: Path) -> None:
    silent = {"signal_sequences/all": 0, "groups/all": 8, "num_trajectories": 64, "reward_mean": 0.0, "reward_std": 0.0}
    metrics = read_metrics(recorded(tmp_path, *(a_batch(index, **silent) for index in range(4))))
    wrong, last = learning_lines(metrics, tmp_path)
    assert wrong.startswith(
        "! no signal: every answer was wrong (reward 0); 32 of 32 groups of 4 batches had none, since batch 0"
    )
    assert last == "no: the reward was 0 in all 256 answers of 4 batches"
    rows = [{**an_eval(0, 0.25), "num_finished": 64}, a_batch(0), {**an_eval(1, 0.75), "num_finished": 64}]
    (only,) = learning_lines(read_metrics(recorded(tmp_path, *rows)), tmp_path)
    assert only.startswith("learned: 0.250 -> 0.750 (change +0.500, 95 %: +0.")
