"""A disk that is full anywhere in a backup or a restore: an error with the place and the free space, nothing stays, and a
second try succeeds. And one that cannot be written at all."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from gspo_services.runs.audit import audit_run
from gspo_services.runs.backup.backup import back_up
from gspo_services.runs.backup.manifest import list_backups
from gspo_services.runs.backup.restore import restore
from gspo_services.shared.runtime.errors import NoRoomError, ServiceError
from tests.support.processes.small_disk import small_disk
from tests.support.processes.small_run import write_small_run
from tests.support.runs.backups import identity, nothing

MIB = 2**20
PAGE = 4096


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("without-room") / "run"
    write_small_run(directory)
    engine = directory / "checkpoints" / "version-0000000002-batch-0000000001" / "engine"
    engine.mkdir()
    (engine / "weights").write_bytes(bytes(300_000))
    return directory


def test_a_backup_that_does_not_fit_leaves_nothing_and_the_one_before_stays(run: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 4 * MIB) as disk:
        backups = disk.path / "backups"
        first, manifest = back_up(run, backups, nothing)
        shutil.rmtree(first / "checkpoints")  # The next one cannot link to these.
        before, needed = sorted(backups.rglob("*")), manifest.num_bytes
        for room in (0, 2 * PAGE, needed // 4, 32 * PAGE, needed // 2, needed - 4 * PAGE):
            disk.fill(room)
            with pytest.raises(ServiceError, match=rf"{backups} cannot be written: .* 0 MiB were free there"):
                back_up(run, backups, nothing)
            assert sorted(backups.rglob("*")) == before, room
            assert not list(run.glob(".backup-*"))
            disk.empty()
        back_up(run, backups, nothing)
        assert len(list_backups(backups)) == 2


def test_a_restore_that_does_not_fit_leaves_nothing(run: Path, tmp_path: Path) -> None:
    _, manifest = back_up(run, tmp_path / "backups", nothing)
    needed = manifest.num_bytes
    with small_disk(tmp_path / "disk", 4 * MIB) as disk:
        for room in (0, 2 * PAGE, needed // 4, needed - 4 * PAGE, needed + 2 * PAGE):
            disk.fill(room)
            with pytest.raises(NoRoomError, match=rf"{disk.path} cannot be written: .* 0 MiB were free there"):
                restore(tmp_path / "backups", disk.path / "run", None, nothing)
            assert [path.name for path in disk.path.iterdir()] == ["ballast"], room
            disk.empty()
        restore(tmp_path / "backups", disk.path / "run", None, nothing)
        assert audit_run(disk.path / "run").problems == []


def test_a_checkpoint_that_cannot_be_held_is_no_checkpoint_that_was_replaced(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "link", refused)
        patched.setattr(shutil, "copy2", full)
        with pytest.raises(NoRoomError, match=r"batch-0000000001 cannot be copied beside the run: .*No space"):
            back_up(run, tmp_path / "backups", nothing)
    back_up(run, tmp_path / "backups", nothing)
    assert len(list_backups(tmp_path / "backups")) == 1


def test_a_run_that_is_mounted_read_only_is_backed_up_and_restored_twice(run: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 4 * MIB) as disk:
        shutil.copytree(run, disk.path / "run")
        disk.set_writable(False)
        _, manifest = back_up(disk.path / "run", tmp_path / "backups", nothing)
    assert manifest.positions == [1]
    for name in ("one", "other"):
        restore(tmp_path / "backups", tmp_path / name, None, nothing)
        assert audit_run(tmp_path / name).problems == []
    assert len({identity(run), identity(tmp_path / "one"), identity(tmp_path / "other")}) == 3
