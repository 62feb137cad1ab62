"""A backup that somebody else made is input: nothing outside the new directory is read or written because of it."""

import json
import os
import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from gspo_services.broker.store.reader import LEDGER_FILE, StoreCorrupt
from gspo_services.broker.store.schema import row_checksum
from gspo_services.cli.main import main
from gspo_services.runs.audit import audit_run
from gspo_services.runs.backup.backup import back_up
from gspo_services.runs.backup.manifest import MANIFEST, BackupDamaged
from gspo_services.runs.backup.restore import restore
from gspo_services.shared.runtime.errors import ConfigurationError, NoRoomError, ServiceError
from tests.fuzz.scratch import scratch
from tests.support.broker.archiving import Archiving, archived
from tests.support.processes.small_run import write_small_run
from tests.support.runs.backups import nothing
from tests.support.runs.hostile_backups import SECRET, bytes_read, contents, declared_bytes, make_hostile, opened_in

HOSTILE = 300
PARTS = {
    "archive", "checkpoints", "data", "ledger.mark", "ledger.sqlite3", "metrics.jsonl", "settings.json", "teacher-scores"
}  # fmt: skip
EMPTY = {
    "format": 1, "name": "x", "run_id": "", "source": "", "num_batches": 1, "positions": [], "new_bytes": 0, "files": {}
}  # fmt: skip
RESTORING = sys.modules[restore.__module__]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("hostile")
    write_small_run(place / "run")
    return back_up(place / "run", place / "backups", nothing)[0]


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder in memory, where flushing costs nothing."""
    with TemporaryDirectory(dir=scratch()) as name:
        yield Path(name)


@pytest.fixture
def victim(place: Path) -> Path:
    directory = place / "victim"
    directory.mkdir()
    (directory / "secret").write_bytes(SECRET)
    return directory


def test_hostile_backups_change_nothing_outside_follow_no_link_and_cost_what_they_declare(
    good: Path, victim: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = []
    forget = RESTORING.forget_commits

    def then_forget(directory: Path) -> None:
        copied.append(bytes_read())
        forget(directory)

    monkeypatch.setattr(RESTORING, "forget_commits", then_forget)
    restore(good, place / "whole", None, nothing)  # Imports what is imported late.
    restored = 0
    for seed in range(HOSTILE):
        backup, target = place / "backup", place / "target"
        make_hostile(good, backup, victim, Random(seed))
        declared, before, copied = declared_bytes(backup), {**contents(victim), **contents(backup)}, []
        with opened_in(victim) as was_opened:
            began = bytes_read()
            try:
                restore(backup, target, Random(seed).choice((None, None, 1)), nothing)
                restored += 1
            except (ServiceError, ConfigurationError):
                assert not target.exists(), seed
            read = (copied[0] if copied else bytes_read()) - began
            assert not was_opened(), seed
        assert {**contents(victim), **contents(backup)} == before, seed
        assert read <= 1.1 * declared + 4096, (seed, read, declared)
        assert sorted(path.name for path in place.iterdir() if path.name not in ("backup", "target")) == ["victim", "whole"]
        if target.exists():
            assert not any(path.is_symlink() for path in target.rglob("*")), seed
            assert all(SECRET not in path.read_bytes() for path in target.rglob("*") if path.is_file()), seed
            assert {path.name for path in target.iterdir()} <= PARTS, seed
            audit_run(target)
            shutil.rmtree(target)
        shutil.rmtree(backup)
    assert 0 < restored < HOSTILE / 2


def entry(content: bytes) -> dict[str, object]:
    return {"num_bytes": len(content), "sha256": sha256(content).hexdigest(), "mtime_ns": 1}


def changed(good: Path, backup: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    shutil.copytree(good, backup)
    plain = json.loads((backup / MANIFEST).read_bytes())
    change(plain)
    (backup / MANIFEST).write_text(json.dumps(plain))
    return backup


def test_a_name_that_leaves_the_directory_writes_nothing_there(good: Path, tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "evil").write_bytes(b"evil")
    backup = changed(good, tmp_path / "backup", lambda plain: plain["files"].update({"../victim/evil": entry(b"evil")}))
    with pytest.raises(BackupDamaged, match=r"'../victim/evil' is no plain relative name; use another"):
        restore(backup, tmp_path / "out" / "run", None, nothing)
    assert not (tmp_path / "out").exists()


def test_an_absolute_name_leaves_the_file_as_it_was(good: Path, victim: Path, tmp_path: Path) -> None:
    name = str(victim / "secret")
    backup = changed(good, tmp_path / "backup", lambda plain: plain["files"].update({name: entry(b"anything")}))
    with pytest.raises(BackupDamaged, match="is no plain relative name"):
        restore(backup, tmp_path / "again", None, nothing)
    assert (victim / "secret").read_bytes() == SECRET


def test_a_link_in_a_backup_is_not_followed(good: Path, victim: Path, tmp_path: Path) -> None:
    name = "data/added/000001-x.jsonl"
    backup = changed(good, tmp_path / "backup", lambda plain: plain["files"].update({name: entry(SECRET)}))
    (backup / name).parent.mkdir(parents=True)
    (backup / name).symlink_to(victim / "secret")
    with pytest.raises(BackupDamaged, match=rf"{name} is a link, or lies behind one: links are not followed"):
        restore(backup, tmp_path / "again", None, nothing)
    # Nor by the next backup, which links to the files of the one before.
    run = Path(shutil.copytree(good.parents[1] / "run", tmp_path / "run"))
    backups = tmp_path / "backups"
    first, _ = back_up(run, backups, nothing)
    (first / "settings.json").rename(tmp_path / "settings.json")
    (first / "settings.json").symlink_to(tmp_path / "settings.json")
    second, _ = back_up(run, backups, nothing)
    assert not (second / "settings.json").is_symlink()


@pytest.mark.parametrize("name", ["checkpoints/evil", "checkpoints/version-x-batch-y/z"])
def test_a_checkpoint_without_a_number_is_refused_whatever_is_asked_for(
    name: str, good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backup = changed(good, tmp_path / "backup", lambda plain: plain["files"].update({name: entry(b"x")}))
    for more in ([], ["--batch", "1"]):
        assert main(["restore", str(backup), str(tmp_path / "again"), *more]) == 1
        assert f"'{name}' is no file that `gspo backup` writes" in capsys.readouterr().out


@pytest.mark.parametrize(
    "content",
    [
        "", "[" * 100_000, '{"format": 1e999}', "\0", "null", "[]", '{"format": 1}',
        json.dumps(EMPTY), json.dumps(EMPTY | {"num_batches": -1, "positions": [-5]}),
    ],
)  # fmt: skip
def test_a_manifest_of_nonsense_is_named(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / MANIFEST).write_text(content)
    assert main(["restore", str(tmp_path), str(tmp_path / "again")]) == 1
    text = capsys.readouterr().out
    assert f"{tmp_path / MANIFEST} cannot be read" in text
    assert text.strip().endswith("use another backup")


def test_a_backup_of_a_hole_is_not_read_and_needs_its_room(good: Path, tmp_path: Path) -> None:
    backup = Path(shutil.copytree(good, tmp_path / "backup"))
    os.truncate(backup / "settings.json", 1 << 42)
    with pytest.raises(BackupDamaged, match=rf"settings.json has {1 << 42} bytes, \d+ were written"):
        restore(backup, tmp_path / "again", None, nothing)
    plain = json.loads((backup / MANIFEST).read_bytes())
    plain["files"]["settings.json"]["num_bytes"] = 1 << 42
    (backup / MANIFEST).write_text(json.dumps(plain))
    with pytest.raises(NoRoomError, match=r"the backup has 4,194,304\.\d MiB"):
        restore(backup, tmp_path / "again", None, nothing)


@pytest.mark.parametrize("table", ["archives", "additions"])
def test_a_ledger_names_no_file_outside_its_run(table: str, victim: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_small_run(run)
    Archiving(run).until(lambda: bool(archived(run)))
    back_up(run, tmp_path / "before", nothing)
    with closing(sqlite3.connect(run / LEDGER_FILE, isolation_level=None)) as connection:
        if table == "additions":
            connection.execute("INSERT INTO additions VALUES (1, 's', 'x', 'd', 2, 1, 0, 0)")
        connection.execute(f"UPDATE {table} SET name = ?", (f"../../{victim.name}/secret",))
        *values, _ = connection.execute(f"SELECT * FROM {table}").fetchone()
        connection.execute(f"UPDATE {table} SET checksum = ?", (row_checksum(table, tuple(values)),))
    with opened_in(victim) as was_opened:
        with pytest.raises(StoreCorrupt, match=rf"a row of {table} cannot be read: .* regex .* at `.*name`"):
            back_up(run, tmp_path / "backups", nothing)
        assert not audit_run(run).clean
        assert not was_opened()
    assert not list((tmp_path / "backups").iterdir())
