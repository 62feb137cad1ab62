"""A run from Python: read, watched while it goes on, and refused where it cannot be."""

import json
import threading
from pathlib import Path

import pytest

import gspo.runs
from gspo.runs import BatchMetrics, HeldOut, Run, RunEvent
from gspo_services.broker.store.lock import LedgerLock
from gspo_services.broker.store.reader import LEDGER_FILE
from gspo_services.runs.scripting import TrainingRun
from gspo_services.runs.scripting import run as run_module
from gspo_services.runs.scripting.processes import overrides_of
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings import load_settings
from tests.support.processes.small_run import NUM_BATCHES, write_small_run
from tests.support.runs.written_runs import write_run


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("scripting") / "run"
    write_small_run(directory)
    return directory


def test_the_ledger_comes_as_typed_rows(recorded: Path) -> None:
    run = Run.open(recorded)
    finished = [each for each in run.trajectories(split="train", status="batched") if each.status == "finished"]
    assert len(finished) == NUM_BATCHES * 4
    assert {each.reward for each in finished} == {0.0, 1.0}
    tokens = run.tokens(finished[0])
    assert tokens.num_tokens == finished[0].num_tokens
    assert tokens.versions_T[tokens.is_action_T].min() == finished[0].min_version
    dropped = {group.group_id: group.drop_reason for group in run.groups(status="dropped")}
    assert dropped == {0: "failed", 5: "stale", 6: "stale"}
    with run.ledger() as ledger:
        assert ledger.facts().num_batches == NUM_BATCHES
    assert run.settings.run.num_batches == NUM_BATCHES
    assert not run.is_live


def test_groups_come_in_pages_that_leave_none_out(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [group.group_id for group in Run.open(recorded).groups()]
    monkeypatch.setattr(run_module, "PAGE", 2)
    assert [group.group_id for group in Run.open(recorded).groups()] == whole
    assert len(whole) > 4


def test_metrics_and_evaluations_are_typed(tmp_path: Path) -> None:
    run = Run.open(write_run(tmp_path / "a", [0.125, 0.5]))
    first, second = run.metrics()
    assert (first.index, second.index, second.reward, second.num_tokens) == (0, 1, 0.5, 101.0)
    assert second.measures["tokens_per_s"] == 50.0
    assert [(each.batch, each.reward) for each in run.evaluations()] == [(0, 0.125), (2, 0.5)]


def test_columns_have_one_row_for_each_batch_evaluation_or_trajectory(recorded: Path, tmp_path: Path) -> None:
    run = Run.open(write_run(tmp_path / "a", [0.125, 0.5]))
    assert run.columns()["batch"] == [0, 1]
    assert run.columns()["train/reward"] == [0.0, 0.5]
    assert run.columns("evaluations")["reward"] == [0.125, 0.5]
    found = Run.open(recorded).columns("trajectories", split="train")
    assert len({len(values) for values in found.values()}) == 1
    assert found["trajectory_id"] == sorted(found["trajectory_id"])
    assert {"group_id", "reward", "lag", "batch"} <= set(found)
    with pytest.raises(ValueError, match=r"kind is 'tokens': use batches, evaluations or trajectories"):
        run.columns("tokens")  # type: ignore[arg-type]


def test_a_frame_has_the_columns_with_pandas_and_says_what_is_missing_without(tmp_path: Path) -> None:
    run = Run.open(write_run(tmp_path / "a", [0.125, 0.5]))
    try:
        import pandas
    except ImportError:
        with pytest.raises(ImportError, match=r"Run.frame needs pandas: pip install pandas; or use Run.columns"):
            run.frame()
        return
    frame = run.frame("evaluations")
    assert isinstance(frame, pandas.DataFrame)
    assert frame["reward"].tolist() == [0.125, 0.5]


def test_a_run_is_watched_as_it_goes_on_until_its_broker_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "POLL_S", 0.01)
    directory = write_run(tmp_path / "a", [0.0, 0.5])
    lines = (directory / "metrics.jsonl").read_text().splitlines(keepends=True)
    (directory / "metrics.jsonl").write_text("".join(lines[:2]))
    lock = LedgerLock(directory / LEDGER_FILE)
    seen: list[object] = []
    two_seen = threading.Event()

    def watch() -> None:
        for event in Run.open(directory).watch(timeout_s=60):
            seen.append(event)
            if len(seen) == 2:
                two_seen.set()

    watching = threading.Thread(target=watch)
    watching.start()
    assert two_seen.wait(60)
    with (directory / "metrics.jsonl").open("a") as file:
        file.write("".join(lines[2:]) + json.dumps({"line": 9, "event": "dropped", "group_id": 3, "time_s": 1.0}) + "\n")
    lock.release()
    watching.join(60)
    assert [type(event) for event in seen] == [HeldOut, BatchMetrics, BatchMetrics, HeldOut, RunEvent]
    assert list(Run.open(directory).watch(history=False)) == []


def test_lines_that_come_while_the_run_ends_are_not_lost(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "a", [0.0, 0.5])
    lines = (directory / "metrics.jsonl").read_text().splitlines(keepends=True)
    (directory / "metrics.jsonl").write_text("".join(lines[:3]))

    class EndsMeanwhile(TrainingRun):
        """The last line is written after the first look at the file; then the broker has left."""

        @property
        def is_live(self) -> bool:
            (directory / "metrics.jsonl").write_text("".join(lines))
            return False

    events = list(EndsMeanwhile.open(directory).watch(timeout_s=60))
    assert [type(event) for event in events] == [HeldOut, BatchMetrics, BatchMetrics, HeldOut]


def test_watching_gives_up_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "POLL_S", 0.01)
    directory = write_run(tmp_path / "a", [0.0, 0.5])
    lock = LedgerLock(directory / LEDGER_FILE)
    try:
        with pytest.raises(TimeoutError, match=r"the run is still active after 0.1 s"):
            Run.open(directory).wait(timeout_s=0.1)
        with pytest.raises(ConfigurationError, match=r"this run is already active"):
            start_again(directory, tmp_path)
    finally:
        lock.release()


def start_again(directory: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (tmp_path / "run.toml").write_text("")
    Run.start(tmp_path / "run.toml", {"run.directory": directory, "model.path": model})


def test_overrides_reach_the_settings_as_they_are(tmp_path: Path) -> None:
    odd = 'a "quoted" \\ path\nwith lines, [brackets] and = signs'
    words = overrides_of(
        {
            "run.directory": tmp_path / "x y",
            "run.seed": 3,
            "learner.learning_rate": 2e-4,
            "learner.profile": True,
            "environment.options": {"text": odd, "numbers": [1, 2.5]},
        }
    )
    settings = load_settings(None, words, {})
    assert settings.run.directory == tmp_path / "x y"
    assert (settings.run.seed, settings.learner.learning_rate, settings.learner.profile) == (3, 2e-4, True)
    assert settings.environment.options == {"text": odd, "numbers": [1, 2.5]}
    with pytest.raises(ConfigurationError, match=r"run.seed is None, a NoneType"):
        overrides_of({"run.seed": None})


def test_what_holds_no_run_or_cannot_be_started_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"holds no run"):
        Run.open(tmp_path)
    with pytest.raises(ConfigurationError, match=r"no such file"):
        Run.start(tmp_path / "none.toml")
    (tmp_path / "run.toml").write_text("")
    with pytest.raises(ConfigurationError, match=r"there is no config.json"):
        Run.start(tmp_path / "run.toml", {"model.path": tmp_path, "run.directory": tmp_path / "run"})
    assert not (tmp_path / "run").exists()


def test_every_error_of_a_run_can_be_caught_by_what_the_door_gives(tmp_path: Path) -> None:
    with pytest.raises(gspo.runs.ConfigurationError, match="holds no run"):
        Run.open(tmp_path)
    with pytest.raises(gspo.runs.NoLedger):
        next(Run.open(write_run(tmp_path / "without a ledger", [0.125, 0.5])).groups())
    assert issubclass(gspo.runs.RunFailed, gspo.runs.ServiceError)
