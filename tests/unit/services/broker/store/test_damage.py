"""What was acknowledged and is lost is found, named, and not written over: before a start, and by the audit."""

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from gspo_services.broker.metrics_file import METRICS_FILE, MetricsFile
from gspo_services.broker.store import commits
from gspo_services.broker.store.damage import StoreDamaged
from gspo_services.broker.store.inspection import inspect
from gspo_services.broker.store.mark import MARK_FILE, SLOT_BYTES, read_mark
from gspo_services.broker.store.payload import stored_chunk
from gspo_services.broker.store.reader import LEDGER_FILE, StoreCorrupt, StoreMismatch
from gspo_services.broker.store.store import RowChanges, Store
from gspo_services.runs.audit.audit import audit_run
from tests.support.processes.small_run import write_checkpoint, write_small_run
from tests.unit.services.broker.store.test_store import arrays, chunk_of, group

WAL = f"{LEDGER_FILE}-wal"
FILES = (LEDGER_FILE, WAL, MARK_FILE, METRICS_FILE, "settings.json", "before.sqlite3", "before.mark")


def open_store(directory: Path) -> Store:
    return Store(directory / LEDGER_FILE, fingerprint="f", run_id="second")


@pytest.fixture(scope="module")
def killed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a killed broker leaves after a small run, and three commits more that only the log has."""
    source, left = (tmp_path_factory.mktemp(name) for name in ("source", "left"))
    write_small_run(source / "run")
    shutil.copytree(source / "run", left, dirs_exist_ok=True)
    shutil.copyfile(left / LEDGER_FILE, left / "before.sqlite3")
    shutil.copyfile(left / MARK_FILE, left / "before.mark")
    with open_store(left) as store:
        store.commit(RowChanges(rows=[group(90)], chunks=[stored_chunk(chunk_of(900, 0, 4), *arrays(4))]))
        store.commit(RowChanges(chunks=[stored_chunk(chunk_of(900, 4, 3), *arrays(3))]))
        store.commit(RowChanges(lines=[{"event": "stop", "time_s": 1.0}]))
        MetricsFile(left / METRICS_FILE).append(store.metrics_after(7))
        for name in FILES:
            shutil.copyfile(left / name, source / name)
        shutil.copytree(left / "checkpoints", source / "checkpoints")
    shutil.rmtree(source / "run")
    return source


@pytest.fixture
def run(killed_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(killed_run, tmp_path / "run"))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def frame(number: int) -> int:
    """The offset of a log's frame."""
    return 32 + number * (24 + 4096)


def old_copy_with_its_own_future(run: Path) -> None:
    """An old copy was continued elsewhere, and put back without its mark."""
    aside = run / "aside"
    aside.mkdir()
    shutil.copyfile(run / "before.sqlite3", aside / LEDGER_FILE)
    shutil.copyfile(run / "before.mark", aside / MARK_FILE)
    with open_store(aside) as store:
        for number in range(5):
            store.commit(RowChanges(rows=[group(70 + number)]))
    (run / WAL).unlink()
    shutil.copyfile(aside / LEDGER_FILE, run / LEDGER_FILE)


def another_runs_ledger(run: Path) -> None:
    (run / WAL).unlink()
    (run / LEDGER_FILE).unlink()
    other = run / "other"
    other.mkdir()
    with Store(other / LEDGER_FILE, fingerprint="f", run_id="other") as store:
        for at in range(200):
            store.commit(RowChanges(rows=[group(at)]))
    shutil.copyfile(other / LEDGER_FILE, run / LEDGER_FILE)


def more_lines(run: Path) -> None:
    with (run / METRICS_FILE).open("a") as file:
        file.write('{"record": 9, "event": "batch"}\n{"record": 10, "event": "batch"}\n')


def old_copy(run: Path) -> None:
    (run / WAL).unlink()
    shutil.copyfile(run / "before.sqlite3", run / LEDGER_FILE)


LOST_3 = "3 commits, 2 chunks, 7 tokens, 1 lines of metrics.jsonl are lost"
DAMAGE: list[tuple[str, Callable[[Path], object], str]] = [
    ("the log is removed", lambda run: (run / WAL).unlink(), rf"{LOST_3}.*ledger.sqlite3-wal is not there"),
    (
        "a bit of the log's header",
        lambda run: flip(run / WAL, 17),
        rf"{LOST_3}.*the header of ledger.sqlite3-wal is damaged",
    ),
    ("a bit of the log's salt", lambda run: flip(run / WAL, 20), rf"{LOST_3}.*the header of ledger.sqlite3-wal is damaged"),
    ("a bit of a frame", lambda run: flip(run / WAL, frame(2) + 50), LOST_3),
    (
        "a bit of the last frame",
        lambda run: flip(run / WAL, (run / WAL).stat().st_size - 50),
        "1 commits, 1 lines of metrics",
    ),
    (
        "the ledger is removed",
        lambda run: (run / LEDGER_FILE).unlink(),
        r"ledger.mark knows of [\d,]+ commits, .* 3 batches",
    ),
    ("the ledger is empty", lambda run: (run / LEDGER_FILE).write_bytes(b""), "ledger.mark knows of .*Put the ledger back"),
    ("an old copy is put back", old_copy, LOST_3),
    ("an old copy went its own way", old_copy_with_its_own_future, "is another one than that of ledger.mark"),
    ("another run's ledger", another_runs_ledger, "ledger.mark belongs to run run, the ledger to run other"),
    ("the mark is removed", lambda run: (run / MARK_FILE).unlink(), "ledger.mark is not there, or cannot be read"),
    ("the mark is damaged", lambda run: [flip(run / MARK_FILE, at) for at in (99, 611)], "not there, or cannot be read"),
    ("metrics.jsonl is longer", more_lines, "metrics.jsonl has 10 lines, the ledger 8"),
    ("a checkpoint of more batches", lambda run: write_checkpoint(run, 9, 5), "covers 5 batches, the ledger has 3"),
]


def content(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file() and path.suffix[-4:] != "-shm"}


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


FLIPS = [
    ("groups", "UPDATE groups SET task_index = task_index + 1 WHERE status = 'complete'"),
    ("groups", "UPDATE groups SET status = 'opdn' WHERE status = 'open'"),
    ("trajectories", "UPDATE trajectories SET turn_rewards = '[2.0]' WHERE group_id IN (SELECT group_id FROM groups "
                     "WHERE status = 'complete')"),
    ("batches", "UPDATE batches SET group_ids = replace(group_ids, '3', '5')"),
    ("versions", "UPDATE versions SET endpoint = 'tcp://x'"),
    ("trained", "UPDATE trained SET policy_version = policy_version + 64"),
    ("checkpointed", "UPDATE checkpointed SET next_batch = 0"),
    ("records", "UPDATE records SET line = replace(line, '1', '3')"),
    ("meta", "UPDATE meta SET value = replace(value, 'e', 'd')"),
    ("commits", "UPDATE commits SET tokens = tokens + 1"),
]  # fmt: skip


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
