"""The rows of a commit as bytes: a ledger that writes them holds the same as the one that they come from."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_services.broker.rows import CheckpointedRow, JournalRow, Row, RunRow, TaskRow, TrajectoryRow
from gspo_services.broker.store import (
    Commit,
    LedgerDiverged,
    RowChanges,
    Store,
    StoreDamaged,
    StoreMismatch,
    StoreUnavailable,
    accept_loss,
    decode_rows,
    encode_rows,
    rewrite_ledger,
)
from gspo_services.broker.store.payload import StoredChunk, chunk_checksum
from gspo_services.broker.store.written_rows import rendered, require_sound

RUN = "run"
numbers = st.integers(0, 2**63 - 1)
# As whoever computes a reward may give it: an integer where a float is meant is stored as it is.
rewards = st.one_of(st.integers(-5, 5), st.floats(allow_nan=False, allow_infinity=False, width=64))
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
trajectories = st.builds(
    TrajectoryRow,
    trajectory_id=st.integers(0, 9),
    group_id=numbers,
    holder_peer=texts,
    reward_size=rewards,
    turn_rewards=st.lists(rewards, max_size=3).map(tuple),
    components=st.dictionaries(texts, rewards, max_size=3),
)
rows = st.one_of(
    trajectories,
    st.builds(TaskRow, task_index=numbers, num_zero_advantage=numbers),
    st.builds(JournalRow, trajectory_id=numbers, place=numbers, entry=st.binary(max_size=20)),
    st.builds(CheckpointedRow, next_batch=numbers),
    st.builds(RunRow, error=texts, filtered_tokens=numbers),
)


def stored(trajectory_id: int, start: int, tokens: bytes) -> StoredChunk:
    place = (trajectory_id, start, 1, len(tokens) // 4)
    return StoredChunk(*place, b"header", tokens, tokens, chunk_checksum(place, b"header", tokens, tokens))


chunks = st.builds(stored, st.integers(0, 9), numbers, st.binary(min_size=4, max_size=32))
lines = st.dictionaries(texts, st.one_of(rewards, texts, st.booleans(), st.none(), st.just(float("nan"))), max_size=4)


class Recording:
    """A log in memory, which refuses as often as it is told."""

    def __init__(self) -> None:
        self.commits: list[tuple[Commit, bytes]] = []
        self.refusals = 0

    def append(self, commit: Commit, before: Commit, content: bytes) -> None:
        if self.refusals:
            self.refusals -= 1
            raise StoreUnavailable("away")
        assert before.number == commit.number - 1
        self.commits.append((commit, content))


def dump(store: Store) -> list[str]:
    return list(store._connection.iterdump())


some_chunks = st.lists(chunks, max_size=3, unique_by=lambda chunk: chunk[:2])


@given(st.lists(st.tuples(st.lists(rows, max_size=6), some_chunks, st.lists(lines, max_size=2)), max_size=4))
def test_a_ledger_that_follows_another_ones_log_is_the_same_to_the_bit(
    commits: list[tuple[list[Row], list[StoredChunk], list[dict[str, Any]]]],
) -> None:
    log, seen = Recording(), set()
    with (
        Store(Path(":memory:"), fingerprint="f", run_id=RUN, log=log) as leader,
        Store(Path(":memory:"), fingerprint="f", run_id=RUN, log=Recording()) as copy,
    ):
        for each_rows, each_chunks, each_lines in commits:
            new = [chunk for chunk in each_chunks if chunk[:2] not in seen]
            seen |= {chunk[:2] for chunk in new}
            leader.commit(RowChanges(rows=each_rows, chunks=new, lines=each_lines))
        for commit, content in log.commits:
            written = decode_rows(content)
            require_sound(written)
            assert encode_rows(written) == content
            copy.follow(commit, written)
        assert copy.newest == leader.newest
        assert dump(copy) == dump(leader)


def test_a_commit_that_the_log_refuses_leaves_nothing_here_and_succeeds_when_it_is_tried_again(tmp_path: Path) -> None:
    log = Recording()
    with Store(tmp_path / "ledger.sqlite3", fingerprint="f", run_id=RUN, log=log) as store:
        log.refusals = 1
        before, changes = dump(store), RowChanges(rows=[TaskRow(task_index=1)], lines=[{"event": "batch"}])
        with pytest.raises(StoreUnavailable, match=r"^away$"):
            store.commit(changes)
        assert (dump(store), store.newest.number, log.commits) == (before, 0, [])
        store.commit(changes)
        assert store._connection.execute("PRAGMA synchronous").fetchone() == (1,), "the log is what makes it durable"
        assert [commit for commit, _ in log.commits] == [store.newest]
        assert store.contents().tasks == (TaskRow(task_index=1),)


def test_a_ledger_with_a_log_is_not_written_alone(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite3"
    with Store(path, fingerprint="f", run_id=RUN, log=Recording()) as store:
        store.commit(RowChanges(rows=[TaskRow(task_index=1)]))
    with pytest.raises(StoreMismatch, match=r"its commits go to a database first, .* set broker\.database as it was"):
        Store(path, fingerprint="f", run_id=RUN)
    (tmp_path / "metrics.jsonl").write_text('{"line": 1}\n')
    with pytest.raises(StoreDamaged, match=r"its commits are in a database, too \(broker\.database\): start the broker"):
        accept_loss(path)
    (tmp_path / "metrics.jsonl").unlink()
    rewrite_ledger(path, run_id="restored")
    with Store(path, fingerprint="f", run_id="") as store:
        assert (store.run_id, store.contents().tasks) == ("restored", (TaskRow(task_index=1),))


def one_commit() -> tuple[Commit, bytes]:
    log = Recording()
    with Store(Path(":memory:"), fingerprint="f", run_id=RUN, log=log) as store:
        store.commit(RowChanges(rows=[TaskRow(task_index=1)], chunks=[stored(1, 0, b"abcd")]))
    return log.commits[0]


def test_a_changed_row_is_found_before_it_is_written() -> None:
    commit, content = one_commit()
    for changed in (content.replace(b"abcd", b"abce", 1), content.replace(b"tasks", b"trash", 1)):
        with Store(Path(":memory:"), fingerprint="f", run_id=RUN) as copy:
            with pytest.raises(
                LedgerDiverged,
                match=r"commit 1 of the log is damaged: (the chunk at 0 of trajectory 1 was ch|there is no table)",
            ):
                copy.follow(commit, decode_rows(changed))
            assert copy.newest.number == 0


def test_a_copy_whose_digest_differs_stops_and_says_both() -> None:
    commit, content = one_commit()
    with Store(Path(":memory:"), fingerprint="f", run_id="another") as copy:
        with pytest.raises(
            LedgerDiverged,
            match=rf"is at commit 0, .* commit 1 with digest .*; the log says commit 1 with digest {commit.digest}\. One",
        ):
            copy.follow(commit, decode_rows(content))
    with Store(Path(":memory:"), fingerprint="f", run_id=RUN) as copy:
        copy.follow(commit, decode_rows(content))
        with pytest.raises(LedgerDiverged, match="is at commit 1, and with the log's next rows would have commit 2"):
            copy.follow(commit, decode_rows(content))


def test_rows_of_another_schema_are_not_read() -> None:
    other = msgspec.structs.replace(rendered([], [], [], 1), schema=5)
    with pytest.raises(ValueError, match=r"^rows of schema 5, this release has schema 2$"):
        decode_rows(encode_rows(other))


def test_the_mark_of_a_ledger_that_lost_its_end_stays_until_the_log_has_given_it_back(tmp_path: Path) -> None:
    from gspo_services.broker.store.mark import read_mark

    path, log = tmp_path / "ledger.sqlite3", Recording()
    with Store(path, fingerprint="f", run_id=RUN, log=log) as store:
        for number in range(3):
            store.commit(RowChanges(rows=[TaskRow(task_index=number)]))
    for each in tmp_path.glob("ledger.sqlite3*"):
        each.unlink()

    def marked() -> int:
        mark = read_mark(tmp_path / "ledger.mark")
        assert mark is not None
        return mark.commit.number

    with Store(path, fingerprint="f", run_id=RUN, log=log) as store:
        assert (store.newest.number, marked()) == (0, 3)
        for commit, content in log.commits:
            store.follow(commit, decode_rows(content))
            assert marked() == 3
