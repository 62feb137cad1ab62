"""A run of several brokers is copied: whole where none of its ledgers changes meanwhile, else as of a checkpoint."""

import shutil
from pathlib import Path

import pytest

from gspo_services.broker.rows import GroupRow, TrajectoryRow
from gspo_services.broker.store import LEDGER_FILE, NoLedger, Store
from gspo_services.broker.store.store import RowChanges
from gspo_services.cli.main import main
from gspo_services.runs.backup import back_up, restore
from gspo_services.runs.ledgers import ledger_directories
from gspo_services.runs.opening import audit_run
from gspo_services.shared.runtime.errors import ServiceError
from gspo_services.shared.settings import read_run_settings
from tests.support.broker.archiving import content, same
from tests.support.broker.ledger import SAMPLING
from tests.support.processes.small_run import write_shared_run
from tests.support.runs.backups import identity, nothing

NUM_BROKERS = 3
GROUP = 900 + 1
"""Of broker 1."""


@pytest.fixture(scope="module")
def shared_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three batches, of which a checkpoint covers one."""
    directory = tmp_path_factory.mktemp("shared") / "run"
    write_shared_run(directory, NUM_BROKERS)
    return directory


@pytest.fixture
def run(shared_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(shared_run, tmp_path / "run"))


def commit(run: Path, status: str = "open") -> None:
    """Broker 1 admits a group."""
    group = GroupRow(
        group_id=GROUP, split="train", prompt=10, task_index=1, evaluation=None, status=status, sampling=SAMPLING
    )
    members = [TrajectoryRow(trajectory_id=GROUP + NUM_BROKERS * place, group_id=GROUP) for place in range(2)]
    with Store(run / "broker-1" / LEDGER_FILE, fingerprint="f", run_id="") as store:
        store.commit(RowChanges(rows=[group, *members]))


@pytest.fixture
def goes_on(run: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Broker 1 commits when its ledger has been copied, and broker 2's has not."""
    from gspo_services.runs.backup import ledgers

    copied = ledgers._copied

    def then_commit(source: Path, destination: Path, say: ledgers.Say) -> ledgers._State:
        state = copied(source, destination, say)
        if source.name == "broker-1":
            commit(run)
        return state

    monkeypatch.setattr(ledgers, "_copied", then_commit)
    return run


def test_a_run_at_rest_comes_back_whole(run: Path, tmp_path: Path) -> None:
    _, manifest = back_up(run, tmp_path / "backups", nothing)
    assert (manifest.one_moment, manifest.num_batches, manifest.positions) == (True, 3, [1])
    again = tmp_path / "again"
    restore(tmp_path / "backups", again, None, nothing)
    assert audit_run(again).problems == []
    for each, original in zip(ledger_directories(again), ledger_directories(run), strict=True):
        assert same(content(each), content(original))
        assert read_run_settings(each).run.directory == again
    assert len({identity(each) for each in ledger_directories(again)}) == NUM_BROKERS


def test_a_run_that_goes_on_comes_back_as_its_newest_checkpoint_had_it(
    goes_on: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["backup", str(goes_on), str(tmp_path / "backups")]) == 0
    assert "restores its newest checkpoint, after 1 batches" in capsys.readouterr().out
    again = tmp_path / "again"
    assert main(["restore", str(tmp_path / "backups"), str(again)]) == 0
    assert "restoring it to the checkpoint of 1 batches" in capsys.readouterr().out
    audit = audit_run(again)
    assert (audit.problems, audit.num_batches) == ([], 1)
    assert [each.num_batches for each in audit.brokers] == [1] * NUM_BROKERS


def test_files_beside_each_ledger_are_checked(run: Path, tmp_path: Path) -> None:
    path, manifest = back_up(run, tmp_path / "backups", nothing)
    assert {"ledger.sqlite3", "broker-1/ledger.sqlite3", "broker-2/settings.json", "broker-2/metrics.jsonl"} <= set(
        manifest.files
    )
    (path / "broker-2" / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ServiceError, match=r"broker-2/metrics\.jsonl is damaged"):
        restore(tmp_path / "backups", tmp_path / "again", None, nothing)
    assert not (tmp_path / "again").exists()


def test_a_run_that_goes_on_without_a_checkpoint_is_refused(
    goes_on: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in ledger_directories(goes_on):
        with Store(each / LEDGER_FILE, fingerprint="f", run_id="") as store:
            store._connection.execute("DELETE FROM checkpointed")
    assert main(["backup", str(goes_on), str(tmp_path / "backups")]) == 1
    printed = capsys.readouterr().out
    assert "no checkpoint covers any batch yet" in printed
    assert "gspo stop" in printed
    assert list((tmp_path / "backups").glob("[0-9]*")) == []


def test_a_run_that_goes_on_with_groups_that_were_requeued_is_refused(run: Path, goes_on: Path, tmp_path: Path) -> None:
    commit(run, status="requeued")
    with pytest.raises(ServiceError, match=r"1 groups of broker-1 were quarantined and requeued.*gspo stop"):
        back_up(goes_on, tmp_path / "backups", nothing)


def test_a_directory_that_is_missing_is_named(run: Path, tmp_path: Path) -> None:
    shutil.rmtree(run / "broker-2")
    with pytest.raises(NoLedger, match="broker-2 does not exist"):
        back_up(run, tmp_path / "backups", nothing)
    with pytest.raises(NoLedger, match="name the directory above it"):
        back_up(run / "broker-1", tmp_path / "backups", nothing)
