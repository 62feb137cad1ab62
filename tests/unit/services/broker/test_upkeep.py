"""What was changed in old rows is found while the broker works, and a reader cannot let the log grow for ever unseen."""

import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from gspo_services.broker import upkeep
from gspo_services.broker.metrics import BrokerMetrics
from gspo_services.broker.store.mark import MARK_FILE
from gspo_services.broker.store.payload import stored_chunk
from gspo_services.broker.store.reader import LEDGER_FILE, reading
from gspo_services.broker.store.scrub import ROWS, Scrub, Scrubbed
from gspo_services.broker.store.store import RowChanges, Store
from gspo_services.broker.upkeep import Upkeep
from gspo_services.shared.runtime.clock import MonotonicClock
from tests.support.broker.rows import arrays, chunk_of, group
from tests.support.clocks import VirtualClock
from tests.support.processes.small_run import write_small_run


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("scrub") / "run"
    write_small_run(directory)
    return directory


@pytest.fixture
def run(small_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_run, tmp_path / "run"))


def one_pass(directory: Path) -> tuple[int, list[str]]:
    scrub, rows, damage = Scrub(directory / LEDGER_FILE), 0, []
    while True:
        step = scrub.step()
        rows += step.rows
        damage += step.damage
        if step.last:
            return rows, damage


@pytest.mark.parametrize(
    ("table", "statement"),
    [
        ("groups", "UPDATE groups SET drop_reason = 'stale' WHERE status = 'dropped' AND drop_reason = 'failed'"),
        ("trajectories", "UPDATE trajectories SET turn_rewards = '[9.0]' WHERE trajectory_id = 3"),
        ("chunks", "UPDATE chunks SET epoch = epoch + 1 WHERE trajectory_id = 3"),
        ("chunks", "UPDATE chunks SET logprobs = zeroblob(length(logprobs)) WHERE trajectory_id = 3"),
        ("journal", "UPDATE journal SET entry = x'c0' WHERE place = 1"),
        ("batches", "UPDATE batches SET group_ids = replace(group_ids, '1', '3') WHERE batch = 0"),
        ("versions", "UPDATE versions SET digest = 'e' WHERE policy_version = 2"),
        ("trained", "UPDATE trained SET how = 'skipped' WHERE batch = 0"),
        ("metrics_lines", "UPDATE metrics_lines SET line = '{}' WHERE number = 1"),
        ("meta", "UPDATE meta SET value = 'g' WHERE key = 'fingerprint'"),
        ("commits", "UPDATE commits SET digest = 'x' WHERE number = 5"),
    ],
)
def test_a_scrub_finds_a_changed_row_of_every_table(run: Path, table: str, statement: str) -> None:
    rows, damage = one_pass(run)
    assert damage == []
    connection = sqlite3.connect(run / LEDGER_FILE)
    changed = connection.execute(statement).rowcount
    assert changed > 0
    connection.commit()
    connection.close()
    again, damage = one_pass(run)
    assert again == rows
    assert len(damage) == changed
    assert all(f" of {table} was changed on the disk" in text for text in damage)


def test_a_scrub_reads_every_row_once_in_short_steps(tmp_path: Path) -> None:
    number = 2 * ROWS + 3
    with Store(tmp_path / LEDGER_FILE, fingerprint="f", run_id="r") as store:
        store.commit(RowChanges(chunks=[stored_chunk(chunk_of(each, 0, 1), *arrays(1)) for each in range(number)]))
        rows, damage = one_pass(tmp_path)
        # Besides the chunks: two rows of meta, and two commits.
        assert (rows, damage) == (number + 4, [])


@pytest.fixture
def held(tmp_path: Path) -> Iterator[tuple[Store, Upkeep, BrokerMetrics]]:
    metrics = BrokerMetrics(CollectorRegistry())
    with Store(tmp_path / LEDGER_FILE, fingerprint="f", run_id="r") as store:
        yield store, Upkeep(store, metrics, MonotonicClock(), lambda: 0.0, log_bytes=100_000), metrics


def test_a_log_that_a_reader_holds_is_reported_once_and_cut_off_when_the_reader_has_gone(
    held: tuple[Store, Upkeep, BrokerMetrics], tmp_path: Path
) -> None:
    store, upkeep, metrics = held
    log = tmp_path / f"{LEDGER_FILE}-wal"
    store.commit(RowChanges(rows=[group(1)]))
    with reading(tmp_path), capture_logs() as said:
        for number in range(4):
            store.commit(RowChanges(chunks=[stored_chunk(chunk_of(number, 0, 20_000), *arrays(20_000))]))
            upkeep.look()
        assert log.stat().st_size > 100_000
    assert [line["event"] for line in said] == ["log_grows"]
    assert "end the `gspo audit`" in said[0]["way_out"]
    assert metrics.log_bytes._value.get() > 100_000
    upkeep.look()
    assert log.stat().st_size == 0
    store.commit(RowChanges(rows=[group(2)]))
    assert [row.group_id for row in store.contents().groups] == [1, 2]


def test_a_mark_that_cannot_be_written_is_reported_and_the_commit_stands(
    held: tuple[Store, Upkeep, BrokerMetrics], tmp_path: Path
) -> None:
    _, upkeep, metrics = held
    (tmp_path / MARK_FILE).unlink()
    with capture_logs() as said:
        upkeep.look()
        upkeep.look()
    assert [line["event"] for line in said] == ["mark_not_written"]
    assert metrics.mark_failing._value.get() == 1


def test_damage_is_an_event_and_stays_visible_until_a_whole_scrub_finds_none(
    held: tuple[Store, Upkeep, BrokerMetrics],
) -> None:
    _, upkeep, metrics = held
    with capture_logs() as said:
        upkeep.report(Scrubbed(rows=5, damage=["the row 3 of groups was changed on the disk"]))
        upkeep.report(Scrubbed(last=True))
        assert metrics.damaged_rows._value.get() == 1
        upkeep.report(Scrubbed(rows=5))
        assert metrics.damaged_rows._value.get() == 1
        upkeep.report(Scrubbed(last=True))
        assert metrics.damaged_rows._value.get() == 0
    assert [line["event"] for line in said] == ["damage_found", "scrubbed", "scrubbed"]


def test_what_a_burst_has_left_in_memory_is_let_go_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[float] = []
    clock = VirtualClock()
    monkeypatch.setattr(upkeep, "return_freed_memory", lambda: released.append(clock.now()))
    with Store(tmp_path / LEDGER_FILE, fingerprint="f", run_id="r") as store:
        looking = Upkeep(store, BrokerMetrics(CollectorRegistry()), clock, lambda: 0.0)
        began = clock.now()
        for _ in range(95):
            looking.look()
            clock.advance(1.0)
    assert [at - began for at in released] == [30.0, 60.0, 90.0]
