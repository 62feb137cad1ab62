"""A ledger that the release before this one has written goes on, and what it was is kept."""

import re
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from gspo_protocol.limits import PROTOCOL_VERSION
from gspo_protocol.releases import other_release
from gspo_services.broker.rows import CheckpointedRow, GroupRow, TaskRow
from gspo_services.broker.store import (
    LEDGER_FILE,
    MARK_FILE,
    NoLedger,
    RowChanges,
    Store,
    StoreDamaged,
    StoreMismatch,
    reading,
)
from gspo_services.broker.store.migration import KEPT
from gspo_services.broker.store.schema import SCHEMA_VERSION, row_checksum
from tests.support.broker.ledger import SAMPLING

PREVIOUS = SCHEMA_VERSION - 1
WRITTEN = Path(__file__).with_name(f"schema{PREVIOUS}.sql")
TOKENS = np.arange(12, dtype=np.int32)


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """What the release before this one has left."""
    path = tmp_path / LEDGER_FILE
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(WRITTEN.read_text())
    path.with_name(MARK_FILE).write_bytes(WRITTEN.with_suffix(".mark").read_bytes())
    return path


def without_a_column(path: Path) -> None:
    """As if the release before had known less of each task."""
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(
            "DROP TABLE tasks; CREATE TABLE tasks (task_index INTEGER PRIMARY KEY, num_silent INTEGER NOT NULL, "
            f"checksum INTEGER NOT NULL); INSERT INTO tasks VALUES (4, 2, {row_checksum('tasks', (4, 2))})"
        )


def schema_of(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        return int(connection.execute("PRAGMA user_version").fetchone()[0])


def dump(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return list(connection.iterdump())


def opened(path: Path) -> Store:
    return Store(path, fingerprint="f", run_id="another")


def test_there_is_a_ledger_of_the_previous_release() -> None:
    """Whoever raises SCHEMA_VERSION records one with the release before: tests run on what was really written."""
    assert WRITTEN.is_file(), f"write {WRITTEN.name} with the release of schema {PREVIOUS}"


def test_a_run_of_the_previous_release_goes_on(ledger: Path) -> None:
    with opened(ledger) as store:
        assert store.run_id == "first"
        assert store.newest.number == 3
        contents = store.contents()
        assert [group.group_id for group in contents.groups] == [1]
        (sampled,) = (group.sampling for group in contents.groups)
        assert (sampled.temperature, sampled.max_tokens) == (0.7, 99)
        (under_way,) = contents.trajectories
        assert (under_way.trajectory_id, under_way.num_tokens, under_way.holder_peer) == (1, 4, "rollout-0")
        assert (under_way.sequences, under_way.num_entries, under_way.components) == ((), 0, {})
        (batch,) = contents.batches
        assert (batch.group_ids, batch.stats.mean_reward, batch.samplings) == ((0,), 0.5, (sampled,))
        assert contents.run.learner_peer == "learner"
        payload = store.payload(0)
        assert payload.token_ids.tobytes() == TOKENS.tobytes()
        assert payload.logprobs.tobytes() == (-TOKENS.astype(np.float32) / 8).tobytes()
        assert [segment.kind for segment in payload.segments] == ["observation", "action"]
        assert store.metrics_after(0) == [{"record": 1, "event": "batch", "time_s": 1.5, "batch": 0}]
        row = GroupRow(group_id=2, split="train", prompt=2, task_index=9, evaluation=None, status="open", sampling=SAMPLING)
        store.commit(RowChanges(rows=[row, CheckpointedRow(next_batch=1)]))
    with opened(ledger) as store:
        assert store.kept is None, "it is of this release now"
        assert [group.group_id for group in store.contents().groups] == [1, 2]
        assert store.newest.number == 4


def test_what_it_was_is_kept_and_is_never_written_again(ledger: Path) -> None:
    before = dump(ledger)
    with opened(ledger) as store:
        kept = store.kept
    assert kept == ledger.with_name(KEPT.format(schema=PREVIOUS))
    assert dump(kept) == before
    file = kept.stat().st_ino
    assert (schema_of(kept), schema_of(ledger)) == (PREVIOUS, SCHEMA_VERSION)
    # A run that was put back to it begins from the same copy.
    with closing(sqlite3.connect(ledger)) as connection:
        connection.executescript("PRAGMA user_version = 0;" + "".join(f"DROP TABLE {name};" for name in tables(ledger)))
        connection.executescript(WRITTEN.read_text())
    with opened(ledger) as store:
        assert store.kept == kept
    assert kept.stat().st_ino == file


def tables(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]


def test_rows_get_what_this_release_knows_besides(ledger: Path) -> None:
    without_a_column(ledger)
    with opened(ledger) as store:
        assert store.contents().tasks == (TaskRow(task_index=4, num_silent=2, rests_until=0),)


def test_a_row_that_the_disk_has_changed_is_named_and_nothing_is_changed(ledger: Path) -> None:
    without_a_column(ledger)
    with closing(sqlite3.connect(ledger)) as connection:
        connection.execute("UPDATE tasks SET num_silent = 5")
        connection.commit()
    before = dump(ledger)
    with pytest.raises(StoreMismatch, match="its checksum is another; continue with that release"):
        opened(ledger)
    assert dump(ledger) == before
    assert schema_of(ledger) == PREVIOUS


def test_what_a_ledger_of_the_previous_release_has_lost_is_found_before_it_is_touched(ledger: Path) -> None:
    with closing(sqlite3.connect(ledger)) as connection:
        connection.execute("DELETE FROM commits WHERE number > 1")
        connection.commit()
    before = dump(ledger)
    with pytest.raises(StoreDamaged, match="Nothing was written"):
        opened(ledger)
    assert dump(ledger) == before
    assert not ledger.with_name(KEPT.format(schema=PREVIOUS)).exists()


def test_a_kill_in_the_middle_leaves_the_old_ledger(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_a_column(ledger)
    before = dump(ledger)
    monkeypatch.setattr("gspo_services.broker.store.migration.forward._row", killed)
    with pytest.raises(KeyboardInterrupt):
        opened(ledger)
    monkeypatch.undo()
    assert dump(ledger) == before
    with opened(ledger) as store:
        assert store.kept is not None


def killed(*_: object) -> None:
    raise KeyboardInterrupt


def test_readers_say_what_brings_it_forward(ledger: Path) -> None:
    with pytest.raises(NoLedger, match="start its broker once with this one"), reading(ledger.parent):
        pass


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (SCHEMA_VERSION + 1, "a newer release has written it. Update this broker first"),
        (PREVIOUS - 1, "each release in between"),
    ],
)
def test_ledgers_of_other_releases_are_refused_with_the_way_out(schema: int, says: str, ledger: Path) -> None:
    with closing(sqlite3.connect(ledger)) as connection:
        connection.execute(f"PRAGMA user_version = {schema}")
    before = dump(ledger)
    with pytest.raises(StoreMismatch, match=re.escape(says)):
        opened(ledger)
    assert dump(ledger) == before


def test_a_peer_of_another_release_is_told_which_one_to_update() -> None:
    newer = other_release("rollout", "rollout-7", PROTOCOL_VERSION + 1, "broker")
    assert "this broker is of the older release, update it" in newer
    older = other_release("rollout", "rollout-7", PROTOCOL_VERSION - 1, "broker")
    assert "the rollout rollout-7 is of the older release, update it" in older
    assert "in the order broker, learner, rollouts" in older
