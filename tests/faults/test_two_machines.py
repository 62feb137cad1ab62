"""Ten thousand commits under settings that would weaken them, cancelled waits, dead and late second machines: what was
acknowledged is on the second machine's disk, as pg_waldump reads it there."""

import itertools
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import pytest

from gspo_services.broker.standby.database import DatabaseLog
from gspo_services.broker.store import Commit, StoreUnavailable
from gspo_services.broker.store.commits import first_commit
from tests.support.postgres.fixtures import SynchronousDatabase
from tests.support.postgres.logs import opened_log
from tests.support.postgres.pooler import pooler, pooler_program
from tests.support.postgres.server import programs

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        programs() is None or pooler_program() is None, reason="not installed: apt-get install postgresql pgbouncer"
    ),
]
COMMITS: Final = int(os.environ.get("GSPO_TEST_COMMITS", "10000"))
SETTINGS: Final = (
    ("client_min_messages", "error"),
    ("synchronous_commit", "off"),
    ("synchronous_commit", "local"),
    ("synchronous_commit", "remote_write"),
    ("statement_timeout", "200ms"),
    ("lock_timeout", "1ms"),
    ("default_transaction_isolation", "serializable"),
    ("client_encoding", "LATIN1"),
    ("bytea_output", "escape"),
    ("standard_conforming_strings", "off"),
)
LEVELS: Final = ("server", "database", "role", "session", "role behind a pooler")
MATRIX: Final = list(itertools.product(LEVELS, SETTINGS))
EACH: Final = max(1, COMMITS // len(MATRIX))


@contextmanager
def weakened(postgres: SynchronousDatabase, role: str, level: str, name: str, value: str) -> Iterator[str]:
    """Yields the connection string of ``role`` under one setting of a server, database, role or session."""
    sql = postgres.server.sql
    if level.endswith("pooler"):
        role = "postgres"  # The pooler knows no other.
    else:
        sql(f"CREATE ROLE {role} LOGIN IN ROLE pg_read_all_stats")
        sql(f"GRANT CREATE ON DATABASE postgres TO {role}")
    own = f"{postgres.conninfo} user={role}"
    if level == "session":
        yield f"{own} options='-c {name}={value}'"
        return
    change = {"server": "ALTER SYSTEM", "database": "ALTER DATABASE postgres"}.get(level, f"ALTER ROLE {role}")
    sql(f"{change} SET {name} = '{value}'")
    sql("SELECT pg_reload_conf()")
    try:
        with pooler(postgres.server, "transaction") if level.endswith("pooler") else nullcontext("") as pooled:
            yield f"{pooled} user={role}" if pooled else own
    finally:
        sql(f"{change} RESET {name}")
        sql("SELECT pg_reload_conf()")


def dead(postgres: SynchronousDatabase, append: Callable[[], None]) -> None:
    """The second machine is gone, and whoever waits for it is told to stop waiting."""
    postgres.witness.stop()
    appending = threading.Thread(target=append)
    appending.start()
    while appending.is_alive():
        postgres.server.sql("SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'")
    appending.join()


def late(postgres: SynchronousDatabase, append: Callable[[], None]) -> None:
    """The second machine stands still, and one wait for it is cancelled before it goes on."""
    pid = postgres.witness.pid
    os.kill(pid, signal.SIGSTOP)
    appending = threading.Thread(target=append)
    appending.start()
    cancel = "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    while appending.is_alive() and not postgres.server.sql(cancel):
        pass
    os.kill(pid, signal.SIGCONT)
    appending.join()


def on_the_second_disk(postgres: SynchronousDatabase) -> set[int]:
    """The transactions whose commit its log has."""
    found: set[int] = set()
    binary = programs()
    assert binary is not None
    with TemporaryDirectory() as folder:
        for segment in sorted(postgres.witness.folder.iterdir()):
            copy = Path(folder) / segment.name.removesuffix(".partial")
            copy.write_bytes(segment.read_bytes())
        names = sorted(path.name for path in Path(folder).iterdir())
        command = [str(binary / "pg_waldump"), "-p", folder, "-r", "Transaction", names[0], names[-1]]
        # It ends with an error at the end of what was written.
        lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    for line in lines:
        if "desc: COMMIT" in line:
            found.add(int(line.split("tx:")[1].split(",")[0]))
    return found


@pytest.mark.parametrize(("level", "setting"), MATRIX, ids=[f"{level}-{name}-{value}" for level, (name, value) in MATRIX])
def test_what_is_acknowledged_is_on_two_machines(
    postgres: SynchronousDatabase, schema: str, level: str, setting: tuple[str, str]
) -> None:
    acknowledged: list[int] = []
    newest = [first_commit("run")]
    with weakened(postgres, f"{schema}_user", level, *setting) as conninfo:
        log = opened_log(postgres, schema, conninfo=conninfo, statement_s=2.0)

        def append() -> None:
            before = newest[-1]
            commit = before.next([before.number + 1])
            if _appended(log, commit, before):
                newest.append(commit)
                acknowledged.append(commit.number)

        for number in range(EACH):
            if number == EACH // 2:
                late(postgres, append)
                try:
                    dead(postgres, append)
                    _require_there(postgres, schema, acknowledged)
                finally:
                    postgres.witness.start()
            append()
        log.database.close()
    postgres.witness.stop()
    try:
        _require_there(postgres, schema, acknowledged)
    finally:
        postgres.witness.start()
    assert acknowledged == list(range(1, len(acknowledged) + 1))
    assert len(acknowledged) >= EACH


def _appended(log: DatabaseLog, commit: Commit, before: Commit) -> bool:
    try:
        log.append(commit, before, b"x" * 100)
    except StoreUnavailable:
        return False
    return True


def _require_there(postgres: SynchronousDatabase, schema: str, acknowledged: list[int]) -> None:
    """The second machine must be down, so that nothing comes after."""
    transactions = dict(postgres.server.sql(f"SELECT number, xmin::text::bigint FROM {schema}.commits"))
    there = on_the_second_disk(postgres)
    missing = [number for number in acknowledged if transactions[number] not in there]
    assert not missing, f"acknowledged, and on one machine: {missing}"
