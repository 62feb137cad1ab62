"""Tokens move from the ledger into archive files: whole, readable by others, and never in neither place."""

import json
import shutil
import sqlite3
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import pytest
from msgspec.structs import replace

from gspo_services.broker.rows import ArchiveRow, CheckpointedRow, GroupRow, TrajectoryRow
from gspo_services.broker.store.archivable import Archivable, groups_to_archive
from gspo_services.broker.store.archive_file import ARCHIVE_DIRECTORY, ArchivedGroup, ArchiveFiles, ArchiveWriter
from gspo_services.broker.store.payload import stored_chunk
from gspo_services.broker.store.reader import LEDGER_FILE, StoreCorrupt, reading
from gspo_services.broker.store.store import RowChanges
from gspo_services.runs.audit import audit_run
from tests.support.broker.archiving import Archiving, Killed, a_store, archived, content, expected_groups, same
from tests.support.broker.peers import logprobs_of, tokens_of
from tests.support.broker.rows import arrays, chunk_of, group
from tests.support.processes.small_run import write_small_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three batches, the first of them checkpointed, and three dropped groups."""
    write_small_run(tmp_path / "run")
    return tmp_path / "run"


def test_what_a_checkpoint_covers_and_what_was_dropped_leaves_the_ledger_and_reads_as_before(run: Path) -> None:
    before, audit_before = content(run), audit_run(run)
    wanted = expected_groups(run, 1)
    Archiving(run).until(lambda: bool(archived(run)))
    assert archived(run) == wanted
    with reading(run) as connection:
        left = connection.execute(
            "SELECT count(*) FROM chunks JOIN trajectories USING (trajectory_id) JOIN archived USING (group_id)"
        ).fetchone()
        assert left == (0,)
    assert same(content(run), before)
    audit = audit_run(run)
    assert audit.problems == []
    assert (audit.num_chunks, audit.outcomes) == (audit_before.num_chunks, audit_before.outcomes)


def test_others_read_the_file_without_this_code(run: Path) -> None:
    Archiving(run).until(lambda: bool(archived(run)))
    (path,) = (run / "archive").glob("trajectories-000001-*.parquet")
    table = parquet.read_table(path)
    rows = table.to_pylist()
    assert rows
    for row in rows:
        length = row["num_tokens"]
        assert row["token_ids"] == tokens_of(row["trajectory_id"], length).tolist()
        assert (
            np.array(row["logprobs"], "<f4").tobytes() == logprobs_of(row["trajectory_id"], length).astype("<f4").tobytes()
        )
        assert sum(segment["num_tokens"] for segment in row["segments"]) == length
    trained = [row for row in rows if row["batch"] == 0]
    assert {row["reward"] for row in trained} == {0.0, 1.0}
    assert {row["drop_reason"] for row in rows if row["batch"] is None} == {"failed", "stale"}


def test_a_kill_at_any_step_leaves_every_token_in_one_place_and_the_next_broker_continues(tmp_path: Path) -> None:
    write_small_run(tmp_path / "new")
    before = content(tmp_path / "new")
    shutil.copytree(tmp_path / "new", tmp_path / "whole")
    whole = Archiving(tmp_path / "whole")
    whole.until(lambda: bool(archived(tmp_path / "whole")))
    num_steps = whole.steps
    assert num_steps > 8
    for step in range(1, num_steps + 1):
        run = shutil.copytree(tmp_path / "new", tmp_path / f"killed-{step}")
        wanted = expected_groups(run, 1)
        with pytest.raises(Killed):
            Archiving(run).until(lambda: False, killed_at=step)
        assert audit_run(run).problems == [], step
        assert same(content(run), before), step
        Archiving(run).until(lambda: archived(run) == wanted)  # noqa: B023
        assert audit_run(run).problems == [], step
        assert same(content(run), before), step
        files = sorted(path.name for path in (run / "archive").iterdir())
        assert len(files) == 1, (step, files)


def test_a_stop_while_a_file_is_written_leaves_none_of_it(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    close, is_closing, stops = ArchiveWriter.close, threading.Event(), threading.Event()

    def slow_close(writer: ArchiveWriter) -> ArchiveRow:
        is_closing.set()
        stops.wait()
        return close(writer)

    def is_stopped() -> bool:
        if is_closing.is_set():
            stops.set()
        return stops.is_set()

    monkeypatch.setattr(ArchiveWriter, "close", slow_close)
    Archiving(run).until(is_stopped)
    assert list((run / "archive").iterdir()) == []
    monkeypatch.undo()
    wanted = expected_groups(run, 1)
    Archiving(run).until(lambda: archived(run) == wanted)


def test_nothing_is_archived_that_may_still_change_or_that_the_policy_keeps(run: Path) -> None:
    with a_store(run) as store:
        dropped = expected_groups(run, 0)
        # Batches 1 and 2 are newer than the checkpoint, whatever the policy says; batch 0 is one of the three newest.
        for keep, wanted in ((1, expected_groups(run, 1)), (2, expected_groups(run, 1)), (3, dropped)):
            enough = 8 * store.number(f"SELECT sum(num_tokens) FROM trajectories WHERE group_id IN {tuple(wanted)}")
            assert sorted(groups_to_archive(store, keep_batches=keep, num_bytes=enough).group_ids) == wanted, keep
            assert groups_to_archive(store, keep_batches=keep, num_bytes=enough + 1) == ([], min(1, 3 - keep) + 1), keep


def test_a_group_of_a_later_batch_that_was_sampled_again_does_not_keep_earlier_batches_in_the_ledger(run: Path) -> None:
    with a_store(run) as store:
        requeued = store.rows(GroupRow, "WHERE batch = 2")[0]
        store.commit(RowChanges(rows=[replace(requeued, status="resampled")]))
    Archiving(run, file_bytes=1).until(lambda: requeued.group_id in archived(run))
    with a_store(run) as store:
        left = groups_to_archive(store, keep_batches=1, num_bytes=1).group_ids
    assert {*archived(run), *left} == {*expected_groups(run, 1), requeued.group_id}


def test_groups_are_chosen_again_only_when_more_batches_may_go(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks_at: list[int] = []

    def looked(*arguments: Any, **options: Any) -> Archivable:
        looks_at.append(archiving.steps)
        return groups_to_archive(*arguments, **options)

    monkeypatch.setattr("gspo_services.broker.retention.groups_to_archive", looked)
    archiving = Archiving(run, file_bytes=2**20)

    def checkpoint_again() -> bool:
        if archiving.steps == 6:
            archiving.store.commit(RowChanges(rows=[CheckpointedRow(next_batch=2)]))
        archiving.retention.wake()
        return len(looks_at) > 1

    archiving.until(checkpoint_again)
    first, second = looks_at
    assert first < 4
    assert second > 6


def test_the_next_look_is_due_with_enough_batches_or_twice_as_many(run: Path) -> None:
    with a_store(run) as store:
        store.commit(RowChanges(rows=[CheckpointedRow(next_batch=3)]))
        groups = ", ".join(map(str, expected_groups(run, 2)))
        measured = 8 * store.number(f"SELECT sum(num_tokens) FROM trajectories WHERE group_id IN ({groups})")
        for num_bytes, due in ((measured + 1, 3), (3 * measured // 2, 3), (2 * measured, 4), (2**40, 4)):
            assert groups_to_archive(store, keep_batches=1, num_bytes=num_bytes) == ([], due), num_bytes


def test_a_run_that_keeps_everything_archives_nothing(run: Path) -> None:
    Archiving(run, keep_batches=0, file_bytes=1).until(lambda: False)
    assert archived(run) == []


def test_a_damaged_group_stays_where_the_audit_finds_it_and_the_others_go(run: Path) -> None:
    connection = sqlite3.connect(run / LEDGER_FILE)
    (spoilt,) = connection.execute("SELECT min(group_id) FROM groups WHERE batch = 0").fetchone()
    members = "(SELECT trajectory_id FROM trajectories WHERE group_id = ?)"
    connection.execute(
        f"UPDATE chunks SET token_ids = zeroblob(length(token_ids)) WHERE trajectory_id IN {members}", (spoilt,)
    )
    connection.commit()
    connection.close()
    wanted = [group_id for group_id in expected_groups(run, 1) if group_id != spoilt]
    Archiving(run).until(lambda: bool(archived(run)))
    assert archived(run) == wanted
    assert set(audit_run(run).findings.counts) == {"chunk was changed"}


def test_an_archive_that_is_missing_or_damaged_is_named_with_what_it_held(run: Path) -> None:
    Archiving(run).until(lambda: bool(archived(run)))
    (path,) = (run / "archive").iterdir()
    whole = path.read_bytes()
    held = "it held the tokens of 10 trajectories in 5 groups, among them those of batches 0 to 0"
    path.write_bytes(whole[:-200] + bytes(200))
    audit = audit_run(run)
    assert audit.findings.counts == {"archive damaged": 1}
    assert held in audit.problems[0]
    with a_store(run) as store, pytest.raises(StoreCorrupt, match=held):
        store.batch(0)
    path.unlink()
    assert held in audit_run(run).problems[0]
    with a_store(run) as store, pytest.raises(StoreCorrupt, match=f"is missing; {held}"):
        store.batch(0)


def test_damage_to_all_of_a_file_does_not_keep_the_rest_in_the_ledger(run: Path) -> None:
    connection = sqlite3.connect(run / LEDGER_FILE)
    connection.execute(
        "UPDATE chunks SET token_ids = zeroblob(length(token_ids)) WHERE trajectory_id IN "
        "(SELECT trajectory_id FROM trajectories JOIN groups USING (group_id) WHERE groups.status = 'dropped')"
    )
    connection.commit()
    connection.close()
    wanted = [group_id for group_id in expected_groups(run, 1) if group_id not in expected_groups(run, 0)]
    Archiving(run, file_bytes=1).until(lambda: set(wanted) <= set(archived(run)))


@pytest.mark.parametrize("offset", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_one_flipped_bit_anywhere_is_found_by_the_audit_and_never_read_as_tokens(run: Path, offset: float) -> None:
    before = content(run)
    Archiving(run).until(lambda: bool(archived(run)))
    (path,) = (run / "archive").iterdir()
    damaged = bytearray(path.read_bytes())
    damaged[int(len(damaged) * offset)] ^= 4
    path.write_bytes(bytes(damaged))
    assert audit_run(run).findings.counts["archive damaged"] == 1
    try:
        assert same(content(run), before)
    except StoreCorrupt as error:
        assert "trajectory" in str(error) or "it held" in str(error)


def test_memory_of_a_group_is_counted_with_its_rows_and_chunks_not_by_its_tokens_alone(run: Path) -> None:
    (group_id, *_) = expected_groups(run, 1)[3:]
    with a_store(run) as store:
        tracemalloc.start()
        try:
            groups = [store.archivable(group_id) for _ in range(64)]
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    counted = sum(group.memory_bytes for group in groups)
    assert counted > 5 * 8 * sum(group.num_tokens for group in groups)
    assert 0.7 * held < counted < 1.3 * held


def test_short_trajectories_fill_row_groups_and_the_cache_of_them_by_the_memory_that_they_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = []
    for number in range(60):
        chunk = stored_chunk(chunk_of(number, 0, 2), *arrays(2))
        row = TrajectoryRow(trajectory_id=number, group_id=0)
        groups.append(ArchivedGroup(group=group(number), members=[(row, [chunk])]))
    monkeypatch.setattr("gspo_services.broker.store.archive_file.ROW_GROUP_BYTES", 10 * groups[0].memory_bytes)
    monkeypatch.setattr("gspo_services.broker.store.archive_file.CACHE_BYTES", 30 * groups[0].memory_bytes)
    writer = ArchiveWriter(tmp_path, 1)
    for each in groups:
        writer.add(each)
    assert list(writer.places.values()) == [number // 10 for number in range(60)]
    assert pyarrow.default_memory_pool().backend_name == "system"
    file = writer.close()
    writer.publish(file)
    files = ArchiveFiles(tmp_path)
    for number in range(60):
        assert files.chunks(file, number // 10, number) == groups[number].members[0][1]
    assert [place for _, place in files._decoded] == [3, 4, 5]


def test_log_probs_keep_every_bit(tmp_path: Path) -> None:
    odd = np.array([0x00000000, 0x80000000, 0x7FC00001, 0xFF800000, 0x00000001, 0xB3800000, 0xBF800001], "<u4").view("<f4")
    chunk = stored_chunk(chunk_of(3, 0, len(odd)), np.arange(len(odd), dtype=np.int32), odd)
    writer = ArchiveWriter(tmp_path, 1)
    writer.add(ArchivedGroup(group=group(0), members=[(TrajectoryRow(trajectory_id=3, group_id=0), [chunk])]))
    row = writer.close()
    writer.publish(row)
    assert (tmp_path / ARCHIVE_DIRECTORY / row.name).stat().st_size == row.num_bytes
    assert ArchiveFiles(tmp_path).chunks(row, 0, 3) == [chunk]


def test_a_full_disk_leaves_the_ledger_as_it_is_and_archiving_is_tried_again(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = 0
    plain = ArchiveWriter.close

    def full(writer: ArchiveWriter) -> Any:
        nonlocal refused
        refused += 1
        if refused <= 2:
            raise OSError(28, "No space left on device")
        return plain(writer)

    monkeypatch.setattr(ArchiveWriter, "close", full)
    monkeypatch.setattr("gspo_services.broker.retention.RETRY_S", 0.0)
    archiving = Archiving(run)
    archiving.until(lambda: bool(archived(run)))
    assert refused == 3
    assert [path.name for path in (run / "archive").iterdir() if path.name.startswith(".")] == []
    assert audit_run(run).problems == []
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines
