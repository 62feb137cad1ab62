"""A real PostgreSQL whose settings change under an open connection: what is acknowledged is on two machines."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from gspo_services.broker.standby.database import CommitState, DatabaseLog, DatabaseRefused, doubt_of
from gspo_services.broker.store import StoreUnavailable
from gspo_services.broker.store.commits import first_commit
from tests.support.postgres.fixtures import SynchronousDatabase
from tests.support.postgres.logs import opened_log
from tests.support.postgres.pooler import pooler, pooler_program

FIRST = first_commit("run")
ONE = FIRST.next([1])
BLOCKS = "transaction blocks not allowed in statement pooling mode"
TWO = ONE.next([2])


def test_a_commit_during_which_settings_were_read_is_doubted() -> None:
    good = CommitState("*", True, True, "noon", "0/1")
    assert doubt_of(good, good) == ""
    assert doubt_of(good, replace(good, read_at="later")) == "the server read its settings again meanwhile"
    for state in (replace(good, standby_names=" "), replace(good, fsync=False), replace(good, full_page_writes=False)):
        assert doubt_of(good, state) == doubt_of(state, good) != ""


@contextmanager
def alone(postgres: SynchronousDatabase) -> Iterator[None]:
    """Without a second machine."""
    postgres.witness.stop()
    try:
        yield
    finally:
        postgres.witness.start()


@pytest.fixture
def log(postgres: SynchronousDatabase, schema: str) -> Iterator[DatabaseLog]:
    opened = opened_log(postgres, schema, statement_s=1.0)
    opened.append(ONE, FIRST, b"1")
    yield opened
    opened.database.close()


@pytest.mark.parametrize("level", ["off", "local"])
def test_a_commit_waits_for_a_second_machine_whatever_the_server_is_told_meanwhile(
    postgres: SynchronousDatabase, log: DatabaseLog, level: str
) -> None:
    postgres.server.setting("synchronous_commit", level)
    try:
        with alone(postgres), pytest.raises(StoreUnavailable, match="gave no answer within 1 s"):
            log.append(TWO, ONE, b"2")
    finally:
        postgres.server.reset("synchronous_commit")
    log.append(TWO, ONE, b"2")
    assert log.confirmed == 2


def test_a_role_whose_commits_wait_for_nobody_is_no_reason_to_acknowledge_them(
    postgres: SynchronousDatabase, schema: str
) -> None:
    postgres.server.sql(f"CREATE ROLE {schema}_user LOGIN SUPERUSER")
    postgres.server.sql(f"ALTER ROLE {schema}_user SET synchronous_commit = off")
    log = opened_log(postgres, schema, statement_s=1.0, conninfo=f"{postgres.conninfo} user={schema}_user")
    with alone(postgres), pytest.raises(StoreUnavailable, match="gave no answer within 1 s"):
        log.append(ONE, FIRST, b"1")
    log.append(ONE, FIRST, b"1")
    log.database.close()


def test_a_wait_that_ends_because_nobody_is_waited_for_any_more_is_no_commit(
    postgres: SynchronousDatabase, schema: str
) -> None:
    """The server wakes whoever waits, and warns of nothing."""
    log = opened_log(postgres, schema)
    log.append(ONE, FIRST, b"1")
    waits = "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'"

    def empty() -> None:
        while not postgres.server.sql(waits):
            assert appending.is_alive()
        postgres.server.setting("synchronous_standby_names", "")

    caught: list[StoreUnavailable] = []
    appending = threading.Thread(target=_append_two, args=(log, caught))
    with alone(postgres):
        appending.start()
        try:
            empty()
            appending.join()
        finally:
            postgres.server.setting("synchronous_standby_names", "*")
    assert "nothing is acknowledged, because its synchronous_standby_names is empty" in str(caught)
    log.append(TWO, ONE, b"2")
    assert log.confirmed == 2
    log.database.close()


def _append_two(log: DatabaseLog, caught: list[StoreUnavailable]) -> None:
    try:
        log.append(TWO, ONE, b"2")
    except StoreUnavailable as error:
        caught.append(error)


def test_a_server_that_says_it_waits_and_does_not_is_asked_for_its_standby(
    postgres: SynchronousDatabase, log: DatabaseLog
) -> None:
    """The checkpointer tells all others to wait, and is busy for minutes at times."""
    postgres.server.setting("synchronous_standby_names", "")
    ((pid,),) = postgres.server.sql("SELECT pid FROM pg_stat_activity WHERE backend_type = 'checkpointer'")
    os.kill(pid, signal.SIGSTOP)
    try:
        postgres.server.setting("synchronous_standby_names", "*")
        with (
            alone(postgres),
            pytest.raises(StoreUnavailable, match=r"no (answer within|synchronous standby has)"),
        ):
            log.append(TWO, ONE, b"2")
    finally:
        os.kill(pid, signal.SIGCONT)
        postgres.server.setting("synchronous_standby_names", "*")
    log.append(TWO, ONE, b"2")
    assert log.confirmed == 2


@pytest.mark.parametrize("grant", ["SUPERUSER", "IN ROLE pg_read_all_stats"])
def test_a_cancelled_wait_is_no_commit_where_a_role_hears_no_warnings(
    postgres: SynchronousDatabase, schema: str, grant: str
) -> None:
    role = f"{schema}_user"
    postgres.server.sql(f"CREATE ROLE {role} LOGIN {grant}")
    postgres.server.sql(f"ALTER ROLE {role} SET client_min_messages = error")
    postgres.server.sql(f"GRANT CREATE ON DATABASE postgres TO {role}")
    log = opened_log(postgres, schema, conninfo=f"{postgres.conninfo} user={role}")
    log.append(ONE, FIRST, b"1")
    caught: list[StoreUnavailable] = []
    appending = threading.Thread(target=_append_two, args=(log, caught))
    with alone(postgres):
        appending.start()
        while appending.is_alive():
            postgres.server.sql("SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'")
        assert "nothing is acknowledged, because no synchronous standby has it yet" in str(caught)
    log.append(TWO, ONE, b"2")
    assert log.confirmed == 2
    log.database.close()


@pytest.mark.parametrize("name", ["fsync", "full_page_writes"])
def test_a_server_that_a_crash_may_break_from_now_on_gets_no_acknowledged_commit(
    postgres: SynchronousDatabase, log: DatabaseLog, name: str
) -> None:
    postgres.server.setting(name, "off")
    try:
        with pytest.raises(StoreUnavailable, match=f"nothing is acknowledged, because its {name} is off: "):
            log.append(TWO, ONE, b"2")
    finally:
        postgres.server.reset(name)
    log.append(TWO, ONE, b"2")
    assert log.confirmed == 2


def test_a_server_that_becomes_read_only_says_so(postgres: SynchronousDatabase, log: DatabaseLog) -> None:
    postgres.server.setting("default_transaction_read_only", "on")
    try:
        with pytest.raises(StoreUnavailable, match="it is read-only: name all servers"):
            log.append(TWO, ONE, b"2")
    finally:
        postgres.server.reset("default_transaction_read_only")
    log.append(TWO, ONE, b"2")


@pytest.mark.skipif(pooler_program() is None, reason="PgBouncer is not installed: apt-get install pgbouncer")
def test_behind_a_pooler_that_keeps_no_session_each_commit_waits_all_the_same(
    postgres: SynchronousDatabase, schema: str
) -> None:
    postgres.server.sql("ALTER ROLE postgres SET synchronous_commit = off")
    try:
        with pooler(postgres.server, "transaction") as conninfo:
            log = opened_log(postgres, schema, statement_s=1.0, conninfo=conninfo)
            log.append(ONE, FIRST, b"1")
            assert log.confirmed == 1
            with alone(postgres), pytest.raises(StoreUnavailable, match="gave no answer within 1 s"):
                log.append(TWO, ONE, b"2")
            log.append(TWO, ONE, b"2")
            assert (log.confirmed, log.after(0, 9)) == (2, [(ONE, b"1"), (TWO, b"2")])
            log.database.close()
        with (
            pooler(postgres.server, "statement") as conninfo,
            pytest.raises(DatabaseRefused, match=BLOCKS),
        ):
            opened_log(postgres, schema + "x", conninfo=conninfo)
    finally:
        postgres.server.sql("ALTER ROLE postgres RESET synchronous_commit")
