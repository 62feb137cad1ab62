"""The durable log: what is committed comes back, what is not leaves no trace, a full disk loses nothing."""

import os
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from gspo_protocol.messages import Segment, VersionRun
from gspo_services.broker.rows import (
    BatchRow,
    BatchStats,
    CheckpointedRow,
    LedgerContents,
    LengthStats,
    TaskRow,
    TrajectoryRow,
)
from gspo_services.broker.standby.database import DatabaseLog
from gspo_services.broker.store import CommitLog
from gspo_services.broker.store.payload import join, merge_runs, merge_segments, stored_chunk
from gspo_services.broker.store.reader import StoreCorrupt, StoreMismatch
from gspo_services.broker.store.schema import SCHEMA_VERSION
from gspo_services.broker.store.store import ROWS_AT_ONCE, RowChanges, Store, StoreUnavailable
from tests.support.broker.ledger import SAMPLING
from tests.support.broker.rows import arrays, chunk_of, group
from tests.support.postgres.logs import opened_log

_open_log: list[Callable[[], CommitLog]] = []
"""What makes the log of the test's ledgers; empty: they have none."""


@pytest.fixture(autouse=True, params=["alone", "with a log"])
def _logged(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test once with a ledger of its own, and once with one whose commits go to PostgreSQL first."""
    if request.param == "alone":
        yield
        return
    postgres, schema = request.getfixturevalue("postgres"), request.getfixturevalue("schema")
    opened: list[DatabaseLog] = []

    def open_log() -> CommitLog:
        opened.append(opened_log(postgres, schema, run_id="first"))
        return opened[-1]

    _open_log.append(open_log)
    yield
    _open_log.clear()
    for log in opened:
        log.database.close()


def open_store(path: Path, fingerprint: str = "f") -> Store:
    log = _open_log[0]() if _open_log else None
    return Store(path, fingerprint=fingerprint, run_id="first", log=log)


MANY, FEW = ROWS_AT_ONCE


@pytest.mark.parametrize("number", [1, FEW - 1, FEW, MANY - 1, MANY, 2 * MANY + 2 * FEW + 3])
def test_any_number_of_rows_is_written_in_order_whatever_one_statement_takes(tmp_path: Path, number: int) -> None:
    path = tmp_path / "ledger.sqlite3"
    tasks = [TaskRow(task_index=place, num_zero_advantage=1) for place in range(number)]
    chunks = [stored_chunk(chunk_of(place, 0, 3), *arrays(3, place)) for place in range(number)]
    with open_store(path) as store:
        # Of rows with the same key the last one counts, also of those in one statement.
        store.commit(RowChanges(rows=[TaskRow(task_index=number - 1, num_zero_advantage=9), *tasks], chunks=chunks))
        assert (store.newest.chunks, store.newest.tokens) == (number, 3 * number)
    with open_store(path) as store:
        assert store.contents().tasks == tuple(tasks)
        assert [store.chunks(place) for place in range(number)] == [[each] for each in chunks]


def test_what_is_committed_is_there_after_the_file_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite3"
    rows = (
        TrajectoryRow(trajectory_id=3, group_id=0, status="finished", num_tokens=5, turn_rewards=(0.1, -2.0)),
        TrajectoryRow(trajectory_id=4, group_id=0, status="leased", epoch=2, holder_peer="r", holder_session="s"),
    )
    with open_store(path) as store:
        store.commit(
            RowChanges(rows=[group(), *rows, CheckpointedRow(next_batch=3)], lines=[{"event": "eval", "time_s": 1.5}])
        )
    with open_store(path) as store:
        contents = store.contents()
        assert (contents.groups, contents.trajectories) == ((group(),), rows)
        assert (contents.next_batch_checkpointed, contents.next_group_id, contents.next_trajectory_id) == (3, 1, 5)
        assert store.run_id == "first"
        assert store.elapsed_s() == 1.5
        assert store.metrics_after(0) == [{"line": 1, "event": "eval", "time_s": 1.5}]
        assert store.metrics_after(1) == []


def test_an_empty_store_begins_at_zero(tmp_path: Path) -> None:
    with open_store(tmp_path / "ledger.sqlite3") as store:
        assert store.contents() == LedgerContents()
        assert store.elapsed_s() == 0


def test_tokens_and_logprobs_come_back_bit_for_bit_however_they_were_cut(tmp_path: Path) -> None:
    token_ids, logprobs = arrays(10)
    with open_store(tmp_path / "ledger.sqlite3") as store:
        for start, end, state in ((0, 3, {"turn": 1}), (3, 4, None), (4, 10, None)):
            chunk = chunk_of(7, start, end - start, state)
            store.commit(RowChanges(chunks=[stored_chunk(chunk, token_ids[start:end], logprobs[start:end])]))
        payload = store.payload(7)
    assert payload.token_ids.tobytes() == token_ids.tobytes()
    assert payload.logprobs.tobytes() == logprobs.tobytes()
    assert payload.segments == [Segment("action", 0, 10)]
    assert payload.version_runs == [VersionRun(1, 10)]
    assert (payload.state, payload.turn_done, payload.turn_rewards) == ({"turn": 1}, True, [0.5, 0.5])


def test_neighbours_are_merged_only_when_they_are_the_same() -> None:
    assert merge_segments([Segment("action", 0, 1), Segment("action", 0, 2), Segment("action", 1, 3)]) == [
        Segment("action", 0, 3),
        Segment("action", 1, 3),
    ]
    assert merge_runs([VersionRun(1, 1), VersionRun(2, 1), VersionRun(2, 4), VersionRun(1, 1)]) == [
        VersionRun(1, 1),
        VersionRun(2, 5),
        VersionRun(1, 1),
    ]


def test_a_gap_between_chunks_is_never_joined_over() -> None:
    pieces = [stored_chunk(chunk_of(7, start, 3), *arrays(3)) for start in (0, 4)]
    with pytest.raises(ValueError, match="trajectory 7: a chunk starts at 4, 3 expected"):
        join(pieces)


def test_a_batch_whose_tokens_do_not_match_its_rows_is_an_error(tmp_path: Path) -> None:
    stats = BatchStats(
        num_groups=1,
        num_trajectories=1,
        num_tokens=4,
        num_action_tokens=4,
        mean_reward=0.0,
        mean_lag=0.0,
        max_lag=0,
        num_zero_advantage_groups=1,
        lengths=LengthStats(mean=4.0, p95=4, max=4, cut_off=0.0),
    )
    batch = BatchRow(index=0, policy_version=1, group_ids=(0,), stats=stats, samplings=(SAMPLING,))
    with open_store(tmp_path / "ledger.sqlite3") as store:
        row = TrajectoryRow(trajectory_id=3, group_id=0, num_tokens=4)
        store.commit(RowChanges(rows=[group(), row, batch], chunks=[stored_chunk(chunk_of(3, 0, 3), *arrays(3))]))
        with pytest.raises(StoreCorrupt, match="trajectory 3 has 3 tokens in its chunks, 4 in its row"):
            store.batch(0)


def test_another_runs_file_is_refused_with_both_fingerprints(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite3"
    open_store(path, "mine").__exit__(None, None, None)
    with pytest.raises(StoreMismatch, match=r"fingerprint mine, the configuration yours.*choose another directory"):
        open_store(path, "yours")
    with open_store(path, "mine") as store:
        assert store.contents() == LedgerContents()


@pytest.mark.parametrize(("other", "writer"), [(SCHEMA_VERSION + 1, "a newer"), (SCHEMA_VERSION - 1, "an older")])
def test_a_ledger_of_another_schema_is_refused_with_both_numbers_and_stays_as_it_is(
    other: int, writer: str, tmp_path: Path
) -> None:
    path = tmp_path / "ledger.sqlite3"
    open_store(path).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {other}")
        before = list(connection.iterdump())
    with pytest.raises(StoreMismatch) as caught:
        open_store(path)
    assert str(caught.value) == (
        f"{path}: schema {other}, this release reads {SCHEMA_VERSION}: {writer} release has written it; use that release, "
        "or choose another run.directory for a new run"
    )
    with closing(sqlite3.connect(path)) as connection:
        assert list(connection.iterdump()) == before
        assert connection.execute("PRAGMA user_version").fetchone() == (other,)


def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite3"
    path.write_bytes(b"something else entirely" * 100)
    with pytest.raises(StoreMismatch, match="is not a ledger"):
        open_store(path)
    assert path.read_bytes() == b"something else entirely" * 100


def test_a_second_broker_on_the_same_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite3"
    with open_store(path), pytest.raises(StoreUnavailable, match="stop the other broker that uses it"):
        open_store(path)


def test_a_directory_that_does_not_exist_is_named(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "ledger.sqlite3"
    with pytest.raises(StoreUnavailable, match=r"missing/ledger.sqlite3: cannot be written.*make its directory exist"):
        open_store(path)


def test_a_full_disk_writes_nothing_of_a_commit_and_everything_when_there_is_space_again(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite3"
    num_tokens = 50_000
    big = stored_chunk(chunk_of(0, 0, num_tokens), *arrays(num_tokens))
    changes = RowChanges(rows=[group()], chunks=[big], lines=[{"event": "x", "time_s": 0.0}])
    with open_store(path) as store:
        store.commit(RowChanges(rows=[group(5)]))
        store._connection.execute(f"PRAGMA max_page_count = {store.num_bytes // 4096 + 4}")
        with pytest.raises(StoreUnavailable, match=r"ledger.sqlite3: cannot be written: .*full; free space on its disk"):
            store.commit(changes)
        assert [row.group_id for row in store.contents().groups] == [5]
        assert store.metrics_after(0) == []
        with pytest.raises(StoreUnavailable):
            store.commit(changes)
        store._connection.execute("PRAGMA max_page_count = 1000000")
        store.commit(changes)
    with open_store(path) as store:
        assert [row.group_id for row in store.contents().groups] == [0, 5]
        assert store.payload(0).num_tokens == num_tokens


def test_a_commit_that_fails_half_way_leaves_no_half(tmp_path: Path) -> None:
    twice = stored_chunk(chunk_of(0, 0, 3), *arrays(3))
    with open_store(tmp_path / "ledger.sqlite3") as store:
        store.commit(RowChanges(chunks=[twice]))
        with pytest.raises(sqlite3.IntegrityError):
            store.commit(RowChanges(rows=[group()], chunks=[twice]))
        assert store.contents().groups == ()
        store.commit(RowChanges(rows=[group(1)]))
        assert [row.group_id for row in store.contents().groups] == [1]


def test_of_several_rows_of_a_trajectory_in_a_commit_only_the_last_is_written(tmp_path: Path) -> None:
    rows = [TrajectoryRow(trajectory_id=3, group_id=0, num_tokens=number) for number in range(5)]
    with open_store(tmp_path / "ledger.sqlite3") as store:
        store.commit(RowChanges(rows=[group()]))
        before = store._connection.total_changes
        store.commit(RowChanges(rows=list(rows)))
        assert store._connection.total_changes - before == 2, "the row, and that of the commit"
        assert store.contents().trajectories == (rows[-1],)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write into a read-only directory")
def test_a_read_only_directory_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(StoreUnavailable, match="writable"):
        open_store(tmp_path / "ledger.sqlite3")
    tmp_path.chmod(stat.S_IRWXU)
