"""The row of a trajectory that somebody extends may be behind its chunks; what else differs is named."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from gspo_services.broker.ledger.actions import SessionKey
from gspo_services.broker.store.reader import LEDGER_FILE
from gspo_services.runs.audit import audit_run
from tests.support.broker.ledger import LEARNER, LedgerHarness, chunk, config_with

A = SessionKey("rollout-a", "s")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Trajectory 0 has a row of 4 tokens, and chunks of 10."""
    world = LedgerHarness(config_with(group_size=1), path=tmp_path / LEDGER_FILE)
    world.hello(LEARNER, "learner")
    world.publish(1, 0)
    world.hello(A)
    (lease,) = world.lease(A, 1)
    for offset, size in ((0, 4), (4, 3), (7, 3)):
        world.send_chunks(A, [replace(chunk(lease, offset, size, 1), state={})])
    world.store.close()
    return tmp_path


def spoilt(run: Path, statement: str) -> list[str]:
    with closing(sqlite3.connect(run / LEDGER_FILE)) as connection:
        connection.execute(statement)
        connection.commit()
    return [str(problem) for problem in audit_run(run).problems]


def test_the_row_of_a_lease_may_be_behind_its_chunks(run: Path) -> None:
    with closing(sqlite3.connect(run / LEDGER_FILE)) as connection:
        assert connection.execute("SELECT num_tokens, status FROM trajectories").fetchall() == [(4, "leased")]
    assert audit_run(run).problems == []


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("UPDATE trajectories SET num_tokens = 5", "tokens 5 in its row, 10 in its chunks"),
        ("UPDATE trajectories SET version_sum = 9", "version sum 9 in its row, 3 in its chunks"),
        ("UPDATE trajectories SET status = 'free'", "tokens 4 in its row, 10 in its chunks"),
        ("UPDATE groups SET status = 'dropped', drop_reason = 'stale'", "tokens 4 in its row, 10 in its chunks"),
        ("UPDATE trajectories SET epoch = 2", "has chunks of epoch 1 after its row, whose own is 2"),
        ("DELETE FROM chunks WHERE start = 0", "the chunk at 4 follows 0 tokens"),
    ],
)
def test_what_no_lease_explains_is_named(statement: str, words: str, run: Path) -> None:
    assert any(words in problem for problem in spoilt(run, statement))
