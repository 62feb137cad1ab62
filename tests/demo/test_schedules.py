"""A run whose data is refreshed twice and whose length doubles is killed, process by process, and its replay is bit for bit
the same. ``make test-demo``."""

import json
from pathlib import Path

import pytest

from gspo_services.broker.rows import BatchRow
from gspo_services.broker.store import LEDGER_FILE, Reader, reading
from tests.support.broker.ledger_audit import audit
from tests.support.processes.run_process import REPOSITORY, RunProcess, gspo
from tests.support.runs.replayed import assert_replayed_whole

pytestmark = [pytest.mark.demo, pytest.mark.timeout(3600)]
NUM_BATCHES = 24
DOUBLES_AT = 20
FIRST_TASKS, ADDED_TASKS = 64, 24
SCHEDULES = (
    "sampling.max_turn_tokens=4", "sampling.max_tokens=32",
    f"schedule.max_turn_tokens={{steps = [[{DOUBLES_AT}, 8]]}}", f"schedule.max_tokens={{steps = [[{DOUBLES_AT}, 64]]}}",
    "schedule.temperature={shape = 'linear', to = 0.8}", "schedule.learning_rate={shape = 'cosine', warmup = 4, to = 1e-6}",
    "schedule.eps_high={shape = 'linear', to = 3e-4}",
)  # fmt: skip
SMALL = (
    f"run.num_batches={NUM_BATCHES}", "batch.group_size=4", "batch.groups_per_batch=8", "rollout.num_servers=1",
    "rollout.max_running=32", "rollout.max_total_tokens=4096", "evaluation.every_batches=0",
    "learner.checkpoint_every_batches=6", "broker.lease_s=5", f"model.path={REPOSITORY / 'models' / 'tiny'}",
)  # fmt: skip


def recorded(directory: Path) -> list[BatchRow]:
    with reading(directory) as connection:
        return Reader(directory / LEDGER_FILE, connection).rows(BatchRow, "ORDER BY batch")


def test_a_run_that_is_refreshed_and_doubles_its_length_survives_every_kill_and_is_replayed_bit_for_bit(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "run"
    first = written(tmp_path / "first.jsonl", range(FIRST_TASKS))
    held_out = written(tmp_path / "held_out.jsonl", range(1000, 1008))
    data = (
        "environment.name=dataset",
        f"environment.options={{train_path = '{first}', eval_path = '{held_out}', answer_marker = '', system_prompt = ''}}",
        "data.dynamic_sampling=true",
    )
    with RunProcess(REPOSITORY / "examples/arithmetic.toml", directory, *SMALL, *SCHEDULES, *data) as run:
        for number, batches in enumerate((2, 6)):
            run.wait_until(f"{batches} batches", lambda most=batches: len(run.rows("batch")) >= most, 1200)  # type: ignore[misc]
            begin = FIRST_TASKS + number * ADDED_TASKS
            more = written(tmp_path / f"more{number}.jsonl", range(begin, begin + ADDED_TASKS))
            gspo("data", "add", str(directory), more)
            run.wait_until("its tasks", lambda most=number: len(run.rows("data_added")) > most, 60)  # type: ignore[misc]
            if number == 0:
                run.kill("gspo_services.broker", "")
        for batches, module, name in (
            (7, "gspo_services.rollout", "rollout-0"), (9, "gspo_services.learner", ""),
            (DOUBLES_AT - 1, "gspo_services.broker", ""),
            (DOUBLES_AT + 1, "gspo_services.learner", ""),
        ):  # fmt: skip
            run.wait_until(f"{batches} batches", lambda most=batches: len(run.rows("batch")) >= most, 1200)  # type: ignore[misc]
            run.kill(module, name)
        assert run.wait_finished(1800) == 0, run.tail()
    report = audit(directory)
    assert report.problems == []
    assert report.num_trained_again >= 1
    rows = recorded(directory)
    assert len(rows) == NUM_BATCHES
    assert drawn(directory) >= 3, "each file gave tasks"
    _lengths_double(rows)
    rates = [row.values.learning_rate or 0.0 for row in rows]
    assert rates[:4] == sorted(rates[:4]), "the warm-up"
    assert rates[4:] == sorted(rates[4:], reverse=True), "the cosine"
    for line in run.rows("batch"):
        assert line["learning_rate"] == pytest.approx(rates[line["batch"]], rel=1e-12)
    assert_replayed_whole(directory, NUM_BATCHES)


def written(path: Path, numbers: range) -> str:
    """Rows of sums, each another one."""
    sums = [(10 + number % 80, 11 + number * 7 % 79) for number in numbers]
    path.write_text("".join(json.dumps({"question": f"{a}+{b}=", "answer": str(a + b)}) + "\n" for a, b in sums))
    return str(path)


def drawn(directory: Path) -> int:
    """From how many of the three files prompts were drawn."""
    with reading(directory) as connection:
        found = [task for (task,) in connection.execute("SELECT DISTINCT task_index FROM groups WHERE split = 'train'")]
    return len({max(0, task - FIRST_TASKS + ADDED_TASKS) // ADDED_TASKS for task in found})


def _lengths_double(rows: list[BatchRow]) -> None:
    """From its batch on, whatever groups of it began before a kill; only a group of another's place may be one batch off."""
    lengths = [{sampling.max_tokens for sampling in row.samplings} for row in rows]
    assert all(each == {32} for each in lengths[: DOUBLES_AT - 1]), lengths
    assert all(each == {64} for each in lengths[DOUBLES_AT + 1 :]), lengths
    temperatures = [sum(sampling.temperature for sampling in row.samplings) / len(row.samplings) for row in rows]
    assert temperatures[0] > temperatures[10] > temperatures[20]
