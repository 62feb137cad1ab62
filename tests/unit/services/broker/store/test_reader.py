"""A ledger is read while its broker writes, after its broker was killed, and from where nothing can be written."""

import sqlite3
from pathlib import Path
from shutil import copyfile
from typing import Any

import pytest
from msgspec.structs import replace

from gspo_protocol.messages import Segment, VersionRun
from gspo_services.broker.rows import GroupRow, TrajectoryRow
from gspo_services.broker.store import reader
from gspo_services.broker.store.payload import StoredChunk, stored_chunk
from gspo_services.broker.store.reader import (
    LEDGER_FILE,
    NoLedger,
    Reader,
    ReaderGaveWay,
    StoreCorrupt,
    reading,
    refusing_damage,
)
from gspo_services.broker.store.schema import SCHEMA_VERSION
from gspo_services.broker.store.store import RowChanges, Store
from gspo_services.runs.audit import audit_run
from tests.support.broker.rows import arrays, chunk_of, group


def open_store(directory: Path) -> Store:
    return Store(directory / LEDGER_FILE, fingerprint="f", run_id="first")


def group_ids(connection: sqlite3.Connection) -> list[int]:
    return [row.group_id for row in Reader(Path("ledger"), connection).rows(GroupRow, "ORDER BY group_id")]


def killed(source: Path, destination: Path) -> Path:
    """What a broker that is killed now leaves: a database and an unmerged log."""
    destination.mkdir()
    for name in (LEDGER_FILE, f"{LEDGER_FILE}-wal"):
        copyfile(source / name, destination / name)
    assert (destination / f"{LEDGER_FILE}-wal").stat().st_size > 0
    return destination


def test_a_reader_sees_one_state_while_the_broker_continues_to_write(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.commit(RowChanges(rows=[group(0)]))
        with reading(tmp_path) as connection:
            assert group_ids(connection) == [0]
            store.commit(RowChanges(rows=[group(1)]))
            assert group_ids(connection) == [0]
        with reading(tmp_path) as connection:
            assert group_ids(connection) == [0, 1]


def test_what_a_killed_broker_had_committed_is_read(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with open_store(tmp_path / "run") as store:
        store.commit(RowChanges(rows=[group(7)]))
        left = killed(tmp_path / "run", tmp_path / "left")
    with reading(left) as connection:
        assert group_ids(connection) == [7]


def test_where_nothing_can_be_written_a_copy_is_read(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with open_store(tmp_path / "run") as store:
        store.commit(RowChanges(rows=[group(7)]))
        left = killed(tmp_path / "run", tmp_path / "left")
    # SQLite needs this file beside the log and cannot make it, even as root: it follows no links.
    (left / f"{LEDGER_FILE}-shm").symlink_to(tmp_path / "nowhere")
    before = {path.name: path.read_bytes() for path in left.iterdir() if path.is_file()}
    with reading(left) as connection:
        assert group_ids(connection) == [7]
    assert {path.name: path.read_bytes() for path in left.iterdir() if path.is_file()} == before


def test_a_reader_cannot_write(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    with reading(tmp_path) as connection, pytest.raises(sqlite3.OperationalError, match="readonly"):
        connection.execute("DELETE FROM groups")


def test_a_directory_without_a_ledger_of_this_release_is_named(tmp_path: Path) -> None:
    with pytest.raises(NoLedger, match=r"is no run directory: it has no ledger.sqlite3"), reading(tmp_path):
        pass
    (tmp_path / LEDGER_FILE).write_bytes(b"something else entirely" * 100)
    with pytest.raises(NoLedger, match=r"ledger.sqlite3 is not a ledger"), reading(tmp_path):
        pass
    (tmp_path / LEDGER_FILE).unlink()
    connection = sqlite3.connect(tmp_path / LEDGER_FILE)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(NoLedger, match=f"schema 99, this release reads {SCHEMA_VERSION}"), reading(tmp_path):
        pass


def damaged(directory: Path, statement: str) -> None:
    """``directory``'s ledger with garbage where the root page of a table was, or with another change."""
    path = directory / LEDGER_FILE
    connection = sqlite3.connect(path)
    if statement.isalpha():
        (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (statement,)).fetchone()
        (size,) = connection.execute("PRAGMA page_size").fetchone()
        connection.close()
        data = bytearray(path.read_bytes())
        data[(root - 1) * size : root * size] = b"\xff" * size
        path.write_bytes(data)
        return
    connection.execute(statement)
    connection.commit()
    connection.close()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("groups", "malformed"),
        ("trained", "malformed"),
        ("UPDATE groups SET drop_reason = CAST(x'ff' AS TEXT), status = 'dropped'", "Could not decode to UTF-8"),
    ],
)
def test_a_damaged_page_is_named_with_the_way_out_and_not_with_sqlites_own_error(
    damage: str, words: str, tmp_path: Path
) -> None:
    with open_store(tmp_path) as store:
        store.commit(RowChanges(rows=[group(0)]))
    damaged(tmp_path, damage)
    way_out = f"{words}.*gspo audit {tmp_path}.* says what cannot be read"
    with open_store(tmp_path) as store, pytest.raises(StoreCorrupt, match=way_out) as refusal:
        store.contents()
    assert str(refusal.value).startswith(f"{tmp_path / LEDGER_FILE} is damaged: ")


def test_a_lock_or_a_constraint_is_no_damage() -> None:
    for error in (sqlite3.OperationalError("database is locked"), sqlite3.IntegrityError("UNIQUE constraint failed")):
        with pytest.raises(type(error)), refusing_damage(Path(LEDGER_FILE)):
            raise error


@pytest.mark.parametrize("column", ["header", "token_ids", "logprobs"])
def test_tokens_that_a_disk_has_changed_are_not_handed_out(column: str, tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.commit(RowChanges(chunks=[stored_chunk(chunk_of(3, 0, 4), *arrays(4))]))
        assert store.payload(3).num_tokens == 4
    connection = sqlite3.connect(tmp_path / LEDGER_FILE)
    ((value,),) = connection.execute(f"SELECT {column} FROM chunks").fetchall()
    connection.execute(f"UPDATE chunks SET {column} = ?", (value[:-1] + bytes([value[-1] ^ 1]),))
    connection.commit()
    connection.close()
    with open_store(tmp_path) as store:
        with pytest.raises(StoreCorrupt, match=r"ledger.sqlite3: trajectory 3: the chunk at 0 was changed on the disk"):
            store.payload(3)


def test_a_long_reader_gives_way_to_the_broker_whose_log_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MOST_GROWTH", 100_000)
    monkeypatch.setattr(reader, "PROGRESS_STEPS", 100)
    many = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 1000) SELECT count(*) FROM n"
    with open_store(tmp_path) as store:
        store.commit(RowChanges(rows=[group(0)]))

        def read_while_the_run_goes_on() -> None:
            with reading(tmp_path) as connection:
                assert connection.execute(many).fetchone() == (1000,)
                store.commit(RowChanges(chunks=[stored_chunk(chunk_of(3, 0, 20_000), *arrays(20_000))]))
                connection.execute(many).fetchone()

        with pytest.raises(ReaderGaveWay, match=r"the run has written .* beside this reader.*gspo backup"):
            read_while_the_run_goes_on()


def test_an_audit_that_gives_way_names_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(tmp_path) as store:
        store.commit(RowChanges(chunks=[stored_chunk(chunk_of(3, 0, 20_000), *arrays(20_000))]))
        monkeypatch.setattr(reader, "MOST_GROWTH", -1)
        monkeypatch.setattr(reader, "PROGRESS_STEPS", 10)
        with pytest.raises(ReaderGaveWay):
            audit_run(tmp_path)


LEASED = TrajectoryRow(
    trajectory_id=3, group_id=0, status="leased", epoch=1, num_tokens=4, num_action_tokens=3, version_sum=6, min_version=2,
    lease_version=2, num_turns=1, num_segments=2, num_runs=2, last_version=2,
)  # fmt: skip


def later(start: int, *versions: int, **fields: Any) -> StoredChunk:
    """More tokens of LEASED's action: one of each of these versions."""
    made = replace(
        chunk_of(3, start, len(versions)),
        segments=[Segment("action", fields.pop("turn", 0), len(versions))],
        version_runs=[VersionRun(version, 1) for version in versions],
        **fields,
    )
    return stored_chunk(made, *arrays(len(versions)))


def test_the_row_of_a_lease_has_the_chunks_that_it_was_behind(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.commit(RowChanges(rows=[group(0), LEASED], chunks=[later(4, 2), later(5, 2, 3)]))
        (row,) = store.contents().trajectories
        assert row == replace(
            LEASED, num_tokens=7, num_action_tokens=6, version_sum=13, lease_version=3, num_runs=3, last_version=3
        )
        # Whoever ends a lease writes the whole row.
        free = replace(row, status="free", holder_peer="", lease_version=0)
        store.commit(RowChanges(rows=[free]))
        assert store.contents().trajectories == (free,)


@pytest.mark.parametrize(
    ("behind", "words"),
    [
        ([later(5, 2)], "a chunk starts at 5, 4 expected"),
        ([later(4, 2), later(6, 2)], "a chunk starts at 6, 5 expected"),
        ([later(4, 2, epoch=2)], "the chunk at 4 does not continue its row"),
        ([later(4, 2, turn=1)], "the chunk at 4 does not continue its row"),
        ([later(4, 2)._replace(checksum=1)], "the chunk at 4 was changed on the disk"),
    ],
)
def test_a_lease_whose_row_does_not_go_on_with_its_chunks_is_damage(behind, words, tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.commit(RowChanges(rows=[group(0), LEASED], chunks=behind))
        with pytest.raises(StoreCorrupt, match=f"a row of trajectories cannot be read: trajectory 3: .*{words}"):
            store.contents()
