"""The trainer gets recorded batches as the learner got them, and the published digests are compared."""

import json
import shutil
import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from gspo_protocol.messages import Batch, BatchRequest, EndOfRun, Trained
from gspo_services.broker.rows import BatchRow, GroupRow, Row
from gspo_services.broker.sending import TokenSpan
from gspo_services.broker.store.reader import LEDGER_FILE, StoreCorrupt
from gspo_services.broker.store.schema import TABLES, row_checksum
from gspo_services.learner.broker.port import BatchAnnounced, PartArrived, Publication
from gspo_services.learner.plan import MINI_BATCH_ORDER
from gspo_services.learner.weights.snapshot import Snapshot
from gspo_services.learner.weights.weight_copy import copy_weights
from gspo_services.runs.replay.__main__ import ranks_of, replay_command, what_changes
from gspo_services.runs.replay.batches import RecordedBroker, RecordedRun
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings import override_settings
from gspo_services.shared.settings.run_settings import read_run_settings
from gspo_services.shared.settings.sections import Learner
from tests.support.broker.made_batches import spans_of
from tests.support.broker.peers import tokens_of
from tests.support.processes.small_run import write_checkpoint, write_small_run
from tests.support.wire.snapshots import snapshot_of


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("replay") / "run"
    write_small_run(directory)
    return directory


@pytest.fixture
def run(small_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_run, tmp_path / "run"))


def change(directory: Path, *statements: str) -> None:
    connection = sqlite3.connect(directory / LEDGER_FILE)
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


def recorded(directory: Path) -> RecordedRun:
    return RecordedRun(directory, read_run_settings(directory))


def taken(source: RecordedRun, index: int) -> tuple[Batch, list[TokenSpan]]:
    """A recorded batch, and the tokens of its trajectories."""
    announced, *parts = source.answers(index)
    assert isinstance(announced, BatchAnnounced)
    return announced.batch, spans_of(announced.batch, [part.arrays for part in parts if isinstance(part, PartArrived)])


def snapshot(version: int, value: float) -> Snapshot:
    return snapshot_of(version, [("weight", torch.full((2,), value))])


def overwrite_root_page(directory: Path, table: str) -> None:
    path = directory / LEDGER_FILE
    connection = sqlite3.connect(path)
    (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()
    (size,) = connection.execute("PRAGMA page_size").fetchone()
    connection.close()
    data = bytearray(path.read_bytes())
    data[(root - 1) * size : root * size] = b"\xff" * size
    path.write_bytes(data)


@pytest.mark.parametrize("table", ["versions", "batches", "groups"])
def test_a_damaged_page_is_named_with_its_file_and_the_way_out(table: str, run: Path) -> None:
    overwrite_root_page(run, table)
    with pytest.raises(StoreCorrupt, match=f"{run / LEDGER_FILE} is damaged: .*malformed.*gspo audit {run}"):
        recorded(run)


def test_a_damaged_page_of_tokens_is_found_by_the_batch_that_needs_it(run: Path) -> None:
    source = recorded(run)
    overwrite_root_page(run, "chunks")
    with pytest.raises(StoreCorrupt, match="is damaged"):
        list(source.answers(0))


def test_a_recorded_batch_is_the_one_that_the_learner_received(run: Path) -> None:
    source = recorded(run)
    assert source.num_batches == 3
    batch, trajectories = taken(source, 1)
    assert (batch.index, batch.policy_version) == (1, 2)
    assert {(item.temperature, item.max_tokens) for item in batch.items} == {(1.0, 64)}
    assert [item.group_id for item in batch.items] == [3, 3, 4, 4]
    for item, span in zip(batch.items, trajectories, strict=True):
        assert span.token_ids.tolist() == tokens_of(item.trajectory_id, item.num_tokens).tolist()
        assert span.version_runs[1, 0] in (1, 2)
    assert all(span.segments[:, -1].sum() == item.num_tokens for item, span in zip(batch.items, trajectories, strict=True))


def test_complete_groups_without_batches_become_batches_in_their_order_each_one_version_later(run: Path) -> None:
    """As in a run without a learner."""
    change(
        run,
        "UPDATE groups SET status = 'complete', batch = NULL WHERE status = 'batched'",
        "DELETE FROM batches",
        "DELETE FROM versions WHERE policy_version > 1",
    )
    _renew_checksums(run, GroupRow)
    source = recorded(run)
    assert source.num_batches == 4
    found = [taken(source, index) for index in range(4)]
    batches = [batch for batch, _ in found]
    assert [[item.group_id for item in batch.items][::2] for batch in batches] == [[1, 2], [3, 4], [7, 8], [9, 10]]
    assert [batch.policy_version for batch in batches] == [1, 2, 3, 4]
    assert found[0][1][0].version_runs.tolist() == [[-1, 1], [1, 4]]


def test_a_batch_is_replayed_with_what_was_recorded_unless_its_schedule_was_changed(run: Path) -> None:
    change(run, "UPDATE batches SET vals = json_set(vals, '$.learning_rate', 0.5) WHERE batch = 1")
    _renew_checksums(run, BatchRow)
    changed = override_settings(read_run_settings(run), ["schedule.learning_rate={shape = 'linear', to = 1e-9}"])
    for settings in (read_run_settings(run), changed):
        batch, _ = taken(RecordedRun(run, settings), 1)
        assert batch.values.learning_rate == 0.5
    batch, _ = taken(RecordedRun(run, changed, rescheduled=True), 1)
    rate = changed.learner.learning_rate
    assert batch.values.learning_rate == pytest.approx(rate + (1e-9 - rate) / 3)


def _renew_checksums(directory: Path, row_type: type[Row]) -> None:
    table, path = TABLES[row_type], directory / LEDGER_FILE
    key = table.columns[0]
    with closing(sqlite3.connect(path)) as connection:
        for values in connection.execute(f"SELECT {', '.join(table.columns)} FROM {table.name}").fetchall():
            checksum = row_checksum(table.name, values)
            connection.execute(f"UPDATE {table.name} SET checksum = ? WHERE {key} = ?", (checksum, values[0]))
        connection.commit()


class Driven:
    """A ``RecordedBroker``, used as the training loop uses it, and what it reported."""

    def __init__(self, run: Path, end: int) -> None:
        self.stop = threading.Event()
        self.lines: list[dict[str, Any]] = []
        self.metrics = run / "replayed.jsonl"
        self.broker = RecordedBroker(recorded(run), end, self.metrics, self.stop, self.lines.append)

    def train(self, index: int, value: float) -> None:
        self.broker.tell(BatchRequest(index=index, policy_version=index + 1))
        announced = self.broker.take(1.0)
        assert isinstance(announced, BatchAnnounced)
        assert announced.batch.index == index
        parts = [self.broker.take(1.0) for _ in range(announced.batch.num_parts)]
        assert [part.part.part for part in parts if isinstance(part, PartArrived)] == list(range(announced.batch.num_parts))
        weights = copy_weights([("weight", torch.full((2,), value))])
        self.broker.publish(
            Publication(
                policy_version=index + 2,
                weights=weights,
                trained_batches=index + 1,
                vocabulary=16,
                note_digest=lambda _: None,
                digest=weights.digest(),
            )
        )
        self.broker.tell(Trained(index=index, policy_version=index + 2, metrics={"loss": value, "reward_mean": 0.5}))


def test_published_weights_are_compared_with_those_of_the_run_and_recorded(run: Path) -> None:
    change(run, f"UPDATE versions SET digest = '{snapshot(9, 1.0).manifest.digest}' WHERE trained_batches = 1")
    driven = Driven(run, end=2)
    driven.train(0, 1.0)
    driven.train(1, 2.0)
    assert driven.broker.comparisons == {1: "same", 2: "different"}
    numbered = [{"line": number, **line} for number, line in enumerate(driven.lines, start=1)]
    assert [json.loads(line) for line in driven.metrics.read_text().splitlines()] == numbered
    assert [(line["event"], line["batch"], line["weights"]) for line in driven.lines] == [
        ("batch", 0, "same"),
        ("batch", 1, "different"),
    ]


def test_the_end_comes_after_the_last_batch_and_then_the_learner_is_stopped(run: Path) -> None:
    driven = Driven(run, end=1)
    driven.train(0, 1.0)
    driven.broker.tell(BatchRequest(index=1, policy_version=2))
    assert driven.broker.take(1.0) == EndOfRun(index=1, reason="all recorded batches are trained")
    assert not driven.stop.is_set()
    assert driven.broker.take(1.0) is None
    assert driven.stop.is_set()


def test_versions_that_the_run_did_not_publish_are_not_compared(run: Path) -> None:
    change(run, "DELETE FROM versions WHERE trained_batches = 1")
    driven = Driven(run, end=1)
    driven.train(0, 1.0)
    assert driven.broker.comparisons == {1: "not recorded"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--set", "model.path=nowhere"], "model.path is nowhere: there is no config.json"),
        (["--from-checkpoint", "2", "--set", "learner.learning_rate=1e-5"], "has checkpoints after these batches: 1"),
        (["--from-checkpoint", "3"], "has 3 batches, and --from-checkpoint is 3: none is left"),
        (["--batches", "0"], "--batches is 0: use at least 1"),
        (["--set", "objective.eps_lo=1"], "did you mean 'eps_low'?"),
        (["--out", ".", "--set", "learner.learning_rate=1e-5"], "is not empty"),
        ([], "has 3 batches, from batch 0 on, that a learner of another release trained: it took their groups in another"),
    ],
)
def test_a_run_that_cannot_be_replayed_gives_a_line_with_the_reason(
    run: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = run / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    monkeypatch.chdir(run)
    write_checkpoint(run, 1, 9).joinpath("checkpoint.json").unlink()
    given = ["--set", f"model.path={model}"] if "model.path=nowhere" not in words else []
    assert replay_command([str(run), *given, *words]) == 2
    assert said in capsys.readouterr().err
    assert not run.with_name("run-replay").exists()


def test_a_run_whose_digests_are_of_another_kind_is_refused_with_the_way_out(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(run, "UPDATE versions SET digest = 'ab' WHERE trained_batches = 2")
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text("{}")
    given = [str(run), "--set", f"model.path={run / 'model'}"]
    assert replay_command(given) == 2
    said = capsys.readouterr().err
    assert "digests of kind 1, and this release makes those of kind 2" in said
    assert "gspo 0.1.0 made kind 1" in said
    assert replay_command([*given, "--batches", "1"]) == 2
    assert "digests of kind" not in capsys.readouterr().err, "what was published after one batch can be compared"


@pytest.mark.parametrize(
    ("override", "changes"),
    [
        ("model.path=there", (False, False)),
        ("learner.dump_tokens = true", (False, False)),
        ("objective.eps_low=1e-3", (True, True)),
        ("learner.learning_rate = 1e-3", (True, True)),
        ("learner.learning_rate=1e-3", (True, True)),
        (" run.num_batches =9", (True, True)),
        ("schedule.learning_rate = {shape = 'cosine'}", (True, True)),
        ("learner.adam_eps = 1e-6", (True, False)),
    ],
)
def test_a_setting_with_spaces_around_it_changes_what_it_does_without(override: str, changes: tuple[bool, bool]) -> None:
    assert what_changes([override]) == changes
    assert what_changes(["learner.adam_eps=1", override]) == (True, changes[1])


def test_the_batches_that_were_trained_in_another_order_are_known(run: Path) -> None:
    dealt = f"UPDATE metrics_lines SET line = json_set(line, '$.mini_batch_order', {float(MINI_BATCH_ORDER)})"
    change(run, f"{dealt} WHERE json_extract(line, '$.event') = 'batch' AND json_extract(line, '$.batch') != 1")
    assert recorded(run).trained_in_another_order(0, 3) == [1]
    assert recorded(run).trained_in_another_order(2, 3) == []


def test_a_directory_that_is_no_run_cannot_be_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay_command([str(tmp_path)]) == 2
    assert "settings.json: missing" in capsys.readouterr().err


def test_the_ranks_of_two_machines_are_all_started_on_this_one() -> None:
    learner = Learner(num_ranks=3, num_nodes=2, rendezvous_address="learner-0:29500")
    assert ranks_of(learner, num_gpus=0) == 6
    assert ranks_of(learner, num_gpus=6) == 6


def test_a_machine_with_fewer_gpus_than_ranks_says_what_to_do() -> None:
    learner = Learner(num_ranks=8, num_nodes=2, rendezvous_address="learner-0:29500")
    with pytest.raises(ConfigurationError, match=r"2 machines.*8 GPUs for 16 ranks.*num_nodes=1 --set learner.num_ranks=8"):
        ranks_of(learner, num_gpus=8)
