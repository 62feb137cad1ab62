"""Answers of an evaluation, read from a ledger beside its broker."""

from pathlib import Path

from gspo_services.runs.track import SampleReader
from gspo_services.runs.track.samples import Sample, SampleTable
from tests.support.processes.evaluated_run import write_evaluated_run


def a_sample(task: int, answer: str) -> Sample:
    return Sample(task=task, prompt="1+1=", answer=answer, reward=1.0, num_tokens=2, ended="done")


def test_a_table_has_a_column_for_each_heading_and_cells_that_stay_cells() -> None:
    table = SampleTable(batch=5, policy_version=6, samples=(a_sample(0, "a|b\n| c"), a_sample(1, "\x1b[2J")))
    assert table.columns()["task"] == [0, 1]
    assert table.rows()[0] == [5, 6, 0, "1+1=", "a|b\n| c", 1.0, 2, "done"]
    lines = table.markdown().splitlines()
    assert lines[0] == "| batch | policy_version | task | prompt | answer | reward | num_tokens | ended |"
    assert lines[2] == "| 5 | 6 | 0 | 1+1= | a\\|b\\n\\| c | 1.0 | 2 | done |"
    assert len(lines) == 4
    assert "\x1b" not in lines[3]


def test_a_run_without_a_ledger_has_no_samples_and_says_why(tmp_path: Path) -> None:
    reader = SampleReader(tmp_path, tmp_path)
    assert reader.evaluation(0, 8) is None
    assert "it has no ledger.sqlite3" in reader.problem


def test_answers_of_an_evaluation_are_read_by_task_with_rewards(tmp_path: Path) -> None:
    write_evaluated_run(tmp_path / "run")
    reader = SampleReader(tmp_path / "run", tmp_path / "run/model")
    table = reader.evaluation(0, 2)
    assert table is not None, reader.problem
    assert (table.batch, table.policy_version) == (0, 1)
    assert [(sample.task, sample.reward, sample.ended) for sample in table.samples] == [(0, 0.5, "done"), (1, 1.0, "done")]
    assert all(sample.prompt and sample.answer for sample in table.samples)
    assert [sample.num_tokens < 4 + place for place, sample in enumerate(table.samples)] == [True, True]
    assert reader.evaluation(5, 2) is None, "there is no such evaluation"


def test_a_model_that_was_moved_away_costs_the_samples_and_says_why(tmp_path: Path) -> None:
    write_evaluated_run(tmp_path / "run")
    reader = SampleReader(tmp_path / "run", tmp_path / "gone")
    assert reader.evaluation(0, 2) is None
    assert "gone" in reader.problem
