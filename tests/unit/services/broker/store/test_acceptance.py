"""A person may go on from what is left of a ledger: it is recorded for ever, and what was there is kept."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from gspo_protocol.messages import LedgerCommit
from gspo_services.broker.metrics_file import METRICS_FILE, MetricsFile
from gspo_services.broker.store import lock
from gspo_services.broker.store.acceptance import accept_loss
from gspo_services.broker.store.mark import MARK_FILE, read_mark
from gspo_services.broker.store.reader import LEDGER_FILE, reading
from gspo_services.broker.store.store import RowChanges, StoreUnavailable
from gspo_services.cli.main import main
from gspo_services.learner.checkpoints import Versions, known_commit
from gspo_services.runs.audit import audit_run
from gspo_services.shared.runtime.errors import EXIT_DAMAGED
from tests.support.broker.damage import DAMAGE, content, killed_run, open_store, run
from tests.support.broker.rows import group
from tests.support.learner.checkpoints import newest_given
from tests.support.processes.small_disk import small_disk
from tests.support.processes.small_run import write_checkpoint, write_small_run
from tests.support.wire.zmq_ends import a_welcome

__all__ = ["killed_run", "run"]  # fixtures

ACCEPTABLE = [row for row in DAMAGE if not row[0].startswith("the ledger is")]


@pytest.mark.parametrize("damage", [row[1] for row in ACCEPTABLE], ids=[row[0] for row in ACCEPTABLE])
def test_the_run_goes_on_and_the_audit_names_the_loss_for_ever(run: Path, damage: Callable[[Path], object]) -> None:
    damage(run)
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    accepted = accept_loss(run / LEDGER_FILE)
    assert accepted is not None
    loss, aside = accepted
    assert aside == run / "damage-1"
    for path in aside.iterdir():
        # A reader leaves an empty log where there was none.
        assert not path.is_file() or path.read_bytes() == before.get(path.name, b"")
    for number in range(2):
        with open_store(run) as store:
            store.commit(RowChanges(rows=[group(60 + number)]))
            MetricsFile(run / METRICS_FILE).append(store.metrics_after(0))
    audit = audit_run(run)
    assert audit.findings.counts["lost, and accepted"] == 1
    assert any(str(loss) in text for text in audit.findings.texts["lost, and accepted"])
    assert "acknowledged and missing" not in audit.findings.counts, audit.problems
    assert accept_loss(run / LEDGER_FILE) is None


def test_peers_that_were_told_of_what_was_lost_and_accepted_go_on_and_the_learner_forgets_it(run: Path) -> None:
    mark = read_mark(run / MARK_FILE)
    assert mark is not None
    told = LedgerCommit(run_id=mark.run_id, number=mark.commit.number, digest=mark.commit.digest)
    ACCEPTABLE[0][1](run)
    Versions(run / "checkpoints", "learner", lambda: told).begin(a_welcome())
    assert known_commit(run / "checkpoints") == told
    assert accept_loss(run / LEDGER_FILE) is not None
    with open_store(run) as store:
        assert not store.contradiction(told)
        assert store.contradiction(replace(store.told, digest="other"))
    assert known_commit(run / "checkpoints") is None
    assert newest_given(run / "checkpoints") == 0


def test_a_full_disk_leaves_the_evidence_alone_and_no_half_of_a_copy(run: Path, tmp_path: Path) -> None:
    ACCEPTABLE[0][1](run)
    with small_disk(tmp_path / "disk", 1 << 21) as disk:
        there = Path(shutil.copytree(run, disk.path / "run"))
        needed = sum(path.stat().st_size for path in there.iterdir() if path.is_file())
        evidence = {path.name: path.read_bytes() for path in there.iterdir() if path.is_file()}
        for room in (0, 1 << 15, needed // 2):
            disk.fill(room)
            with pytest.raises(StoreUnavailable, match=r"0 MiB are free there\. Nothing was changed: make room"):
                accept_loss(there / LEDGER_FILE)
            assert [path.name for path in there.glob("*damage*")] == [], room
            assert {name: (there / name).read_bytes() for name in evidence} == evidence, room
            disk.empty()
        assert accept_loss(there / LEDGER_FILE) is not None


def test_a_full_disk_is_no_damage_of_a_ledger_whose_broker_ended_in_order(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 21) as disk:
        there = disk.path / "run"
        write_small_run(there)
        disk.fill()
        with reading(there) as connection:
            assert connection.execute("SELECT count(*) FROM batches").fetchone() == (3,)
        with pytest.raises(StoreUnavailable, match="No space left on device; free space on its disk"):
            open_store(there)
        disk.empty()
        open_store(there).close()


def test_checkpoints_of_lost_batches_are_moved_out_of_the_learners_way(run: Path) -> None:
    damage = next(row[1] for row in DAMAGE if row[0] == "a checkpoint of more batches")
    damage(run)
    lost = next(path.name for path in (run / "checkpoints").glob("version-*-0000000005"))
    (run / "checkpoints" / "latest").write_text(f"{lost}\n")
    accept_loss(run / LEDGER_FILE)
    assert (run / "damage-1" / lost / "checkpoint.json").is_file()
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["version-0000000002-batch-0000000001"]


def test_a_checkpoint_of_a_batch_whose_training_is_not_known_is_moved_too(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_small_run(run, reports_last=False)
    (run / MARK_FILE).unlink()
    unknown = write_checkpoint(run, 5, 3)
    accept_loss(run / LEDGER_FILE)
    assert (run / "damage-1" / unknown.name).is_dir()
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["version-0000000002-batch-0000000001"]


def test_commit_numbers_of_a_lost_past_are_not_used_again(run: Path) -> None:
    mark = read_mark(run / MARK_FILE)
    assert mark is not None
    (run / f"{LEDGER_FILE}-wal").unlink()
    accept_loss(run / LEDGER_FILE)
    with open_store(run) as store:
        assert store.newest.number == mark.commit.number + 1


def test_the_command_says_what_it_did(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "LOCK_WAIT_S", 0.0)
    assert main(["accept-loss", str(run)]) == 0
    assert "nothing is missing" in capsys.readouterr().out
    (run / f"{LEDGER_FILE}-wal").unlink()
    assert main(["accept-loss", str(run)]) == 0
    said = capsys.readouterr().out
    assert "3 commits, 2 chunks, 7 tokens" in said
    assert f"kept in {run}/damage-1" in said
    with open_store(run):
        assert main(["accept-loss", str(run)]) == 1
    assert "stop it first" in capsys.readouterr().err


def test_without_a_ledger_there_is_nothing_to_go_on_from(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / LEDGER_FILE).unlink()
    before = content(run)
    assert main(["accept-loss", str(run)]) == EXIT_DAMAGED
    assert "Put the ledger back from a backup" in capsys.readouterr().err
    assert content(run) == before
