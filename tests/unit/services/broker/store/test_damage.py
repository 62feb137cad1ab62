"""What was acknowledged and is lost is found, named, and not written over: before a start, and by the audit."""

import errno
import fcntl
import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from gspo_services.broker.store import commits
from gspo_services.broker.store.damage import StoreDamaged
from gspo_services.broker.store.inspection import inspect
from gspo_services.broker.store.mark import MARK_FILE, SLOT_BYTES, read_mark
from gspo_services.broker.store.payload import stored_chunk
from gspo_services.broker.store.reader import LEDGER_FILE, StoreCorrupt, StoreMismatch
from gspo_services.broker.store.store import RowChanges, StoreUnavailable
from gspo_services.runs.audit import audit_run
from tests.support.broker.damage import (
    DAMAGE,
    FLIPS,
    WAL,
    content,
    flip,
    killed_run,
    open_store,
    run,
)
from tests.support.broker.rows import arrays, chunk_of, group

__all__ = ["killed_run", "run"]


@pytest.mark.parametrize(("damage", "words"), [row[1:] for row in DAMAGE], ids=[row[0] for row in DAMAGE])
def test_what_is_lost_is_named_before_anything_is_written_over(
    run: Path, damage: Callable[[Path], object], words: str
) -> None:
    damage(run)
    before = content(run)
    with pytest.raises(StoreDamaged, match=words) as refusal:
        open_store(run)
    assert str(run) in str(refusal.value)
    audit = audit_run(run)
    assert not audit.clean
    assert audit.findings.counts["acknowledged and missing"] >= 1, audit.problems
    # A reader may leave an empty log, as SQLite does. What was there before is there, byte for byte.
    after = content(run)
    assert {name: after[name] for name in before} == before
    with pytest.raises(StoreDamaged, match=words):
        open_store(run)


@pytest.mark.parametrize("damage", [lambda log: log.unlink(), lambda log: flip(log, 17)], ids=["removed", "header"])
def test_a_young_ledger_that_is_all_in_its_log_is_no_new_run_without_it(
    damage: Callable[[Path], object], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    with open_store(tmp_path / "run") as store:
        store.commit(RowChanges(rows=[group(1)], chunks=[stored_chunk(chunk_of(1, 0, 4), *arrays(4))]))
        left = Path(shutil.copytree(tmp_path / "run", tmp_path / "left"))
    damage(left / WAL)
    with pytest.raises(StoreDamaged, match=r"ledger.mark knows of 1 commits, 1 chunks, 4 tokens.*from a backup, or choose"):
        open_store(left)
    assert "acknowledged and missing" in audit_run(left).findings.counts


def test_what_a_killed_broker_leaves_is_whole(run: Path) -> None:
    assert not inspect(run / LEDGER_FILE)
    with open_store(run) as store:
        assert store.payload(900).num_tokens == 7
        number = store.newest.number
    with open_store(run) as store:
        assert store.newest.number == number


def test_a_mark_is_written_with_every_commit_and_one_torn_slot_costs_one_commit(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for number in range(1, 6):
            store.commit(RowChanges(rows=[group(number)]))
            mark = read_mark(tmp_path / MARK_FILE)
            assert mark is not None
            assert mark.commit == store.newest
            assert mark.commit.number == number
    flip(tmp_path / MARK_FILE, SLOT_BYTES + 40)
    torn = read_mark(tmp_path / MARK_FILE)
    assert torn is not None
    assert torn.commit.number == 4
    open_store(tmp_path).close()


def test_a_mark_that_is_too_old_to_be_compared_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commits, "RECENT_COMMITS", 16)
    with open_store(tmp_path) as store:
        store.commit(RowChanges(rows=[group(1)]))
        old = (tmp_path / MARK_FILE).read_bytes()
        for number in range(17):
            store.commit(RowChanges(rows=[group(number)]))
    (tmp_path / MARK_FILE).write_bytes(old)
    audit = audit_run(tmp_path)
    assert any("ledger.mark is 17 commits behind the ledger" in note for note in audit.notes)
    assert "acknowledged and missing" not in audit.findings.counts
    open_store(tmp_path).close()


def test_a_ledger_tells_a_past_that_is_not_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commits, "RECENT_COMMITS", 16)
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    with open_store(here) as store:
        store.commit(RowChanges(rows=[group(1)]))
        common = store.told
    shutil.copytree(here, there)
    told = []
    for directory, number in ((here, 2), (there, 3)):
        with open_store(directory) as store:
            for each in (number, 4):
                store.commit(RowChanges(rows=[group(each)]))
                told.append(store.told)
    with open_store(there) as store:
        assert [bool(store.contradiction(each)) for each in (common, *told)] == [False, True, True, False, False]
        assert "its commit 2 is another one" in store.contradiction(told[0])
        later = replace(common, number=9)
        assert store.contradiction(later) == "it ends at commit 3, and this process was told of commit 9"
        # Too long ago to be compared.
        for number in range(16):
            store.commit(RowChanges(rows=[group(number)]))
        assert not store.contradiction(told[0])
        assert store.contradiction(replace(store.told, digest="other"))


def test_a_directory_without_a_run_gets_a_new_ledger(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    with open_store(tmp_path) as store:
        assert store.newest.number == 0
    # A run that has acknowledged nothing has nothing to lose.
    (tmp_path / LEDGER_FILE).unlink()
    open_store(tmp_path).close()


def test_settings_without_a_ledger_are_no_new_run(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text("{}")
    with pytest.raises(StoreDamaged, match=r"settings.json is there, which is written after the ledger"):
        open_store(tmp_path)
    assert not (tmp_path / LEDGER_FILE).exists()


def test_a_ledger_whose_first_page_is_gone_is_damaged_and_not_a_strangers_file(run: Path) -> None:
    path = run / LEDGER_FILE
    path.write_bytes(b"\0" * 100 + path.read_bytes()[100:])
    with pytest.raises(StoreCorrupt, match=r"ledger.mark says that it was one"):
        open_store(run)
    (run / MARK_FILE).unlink()
    with pytest.raises(StoreMismatch, match="is not a ledger"):
        open_store(run)


def read_everything(run: Path) -> None:
    with open_store(run) as store:
        store.contents()
        store.batch(0)
        store.metrics_after(0)


@pytest.mark.parametrize(("table", "statement"), FLIPS, ids=[statement for _, statement in FLIPS])
def test_a_changed_row_is_named_by_the_audit_and_where_it_is_needed(run: Path, table: str, statement: str) -> None:
    with open_store(run) as store:
        store.commit(RowChanges(rows=[group(91)]))
    connection = sqlite3.connect(run / LEDGER_FILE)
    assert connection.execute(statement).rowcount > 0
    connection.commit()
    connection.close()
    audit = audit_run(run)
    assert audit.findings.counts["row was changed"] > 0, audit.problems
    assert any(table in text or "commit" in text for text in audit.findings.texts["row was changed"])
    with pytest.raises(StoreCorrupt):
        read_everything(run)


def test_a_changed_row_that_nothing_needs_stops_nothing(run: Path) -> None:
    connection = sqlite3.connect(run / LEDGER_FILE)
    connection.execute("UPDATE trajectories SET turn_rewards = '[9.0]' WHERE trajectory_id = 3")
    connection.commit()
    connection.close()
    with open_store(run) as store:
        store.contents()
        with pytest.raises(StoreCorrupt, match=r"a row of trajectories cannot be read: .*was changed on the disk"):
            store.batch(0)
    assert audit_run(run).findings.counts["row was changed"] == 1


@pytest.mark.parametrize("key", ["fingerprint", "run_id"])
def test_a_missing_row_of_meta_is_named(run: Path, key: str) -> None:
    connection = sqlite3.connect(run / LEDGER_FILE)
    connection.execute("DELETE FROM meta WHERE key = ?", (key,))
    connection.commit()
    connection.close()
    with pytest.raises(StoreCorrupt, match=f"the row '{key}' of meta is missing"):
        open_store(run)


def test_a_ledger_that_somebody_has_for_a_moment_is_not_damaged(run: Path) -> None:
    with closing(sqlite3.connect(run / LEDGER_FILE, isolation_level=None)) as somebody:
        somebody.execute("PRAGMA locking_mode = EXCLUSIVE")
        somebody.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreUnavailable, match="database is locked"):
            open_store(run)
    open_store(run).close()


def test_a_ledger_whose_disk_is_away_is_not_held_by_anybody(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", away)
    with pytest.raises(StoreUnavailable, match=r"ledger\.sqlite3-lock: Input/output error"):
        open_store(run)
