"""A killed run's store, and what may be damaged in it."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gspo_services.broker.metrics_file import METRICS_FILE, MetricsFile
from gspo_services.broker.store.mark import MARK_FILE
from gspo_services.broker.store.payload import stored_chunk
from gspo_services.broker.store.reader import LEDGER_FILE
from gspo_services.broker.store.store import RowChanges, Store
from tests.support.broker.rows import arrays, chunk_of, group
from tests.support.processes.small_run import write_checkpoint, write_small_run

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
        file.write('{"line": 9, "event": "batch"}\n{"line": 10, "event": "batch"}\n')


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


FLIPS = [
    ("groups", "UPDATE groups SET task_index = task_index + 1 WHERE status = 'complete'"),
    ("groups", "UPDATE groups SET status = 'opdn' WHERE status = 'open'"),
    ("trajectories", "UPDATE trajectories SET turn_rewards = '[2.0]' WHERE group_id IN (SELECT group_id FROM groups "
                     "WHERE status = 'complete')"),
    ("batches", "UPDATE batches SET group_ids = replace(group_ids, '3', '5')"),
    ("versions", "UPDATE versions SET endpoint = 'tcp://x'"),
    ("trained", "UPDATE trained SET policy_version = policy_version + 64"),
    ("checkpointed", "UPDATE checkpointed SET next_batch = 0"),
    ("metrics_lines", "UPDATE metrics_lines SET line = replace(line, '1', '3')"),
    ("meta", "UPDATE meta SET value = replace(value, 'e', 'd')"),
    ("commits", "UPDATE commits SET tokens = tokens + 1"),
]  # fmt: skip
