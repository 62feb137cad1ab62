"""What a real PostgreSQL does to a broker, and what the broker says."""

from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote

import pytest

from gspo_services.broker.standby.database import Database, DatabaseRefused, open_log
from gspo_services.broker.store import Commit, LedgerDiverged, StoreUnavailable
from gspo_services.broker.store.commits import first_commit
from tests.support.postgres.fixtures import SynchronousDatabase
from tests.support.postgres.logs import opened_log
from tests.support.processes.ports import free_port
from tests.support.wire.relay import Relay

FIRST = first_commit("run")
ONE = FIRST.next([1])
TWO = ONE.next([2])


@contextmanager
def a_database(postgres: SynchronousDatabase, schema: str, **parts: object) -> Iterator[Database]:
    conninfo = " ".join([postgres.conninfo, *(f"{key}={value}" for key, value in parts.items())])
    database = Database(conninfo, schema, allow_asynchronous=False)
    try:
        yield database
    finally:
        database.close()


def refused(postgres: SynchronousDatabase, schema: str, **parts: object) -> str:
    with a_database(postgres, schema, **parts) as database, pytest.raises(DatabaseRefused) as caught:
        open_log(database, fingerprint="f", run_id="run")
    return str(caught.value)


def test_a_string_that_cannot_be_read_is_not_shown_because_it_may_hold_a_password() -> None:
    with pytest.raises(DatabaseRefused, match=r"broker\.database cannot be read .* write postgresql://user@host") as caught:
        Database("hunter2 secret", "s", allow_asynchronous=False)
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert "hunter2" not in str(caught.value.__context__) or caught.value.__suppress_context__


def test_no_error_shows_the_password(schema: str) -> None:
    database = Database(f"postgresql://me:{quote('hunter2')}@127.0.0.1:{free_port()}/runs", schema, allow_asynchronous=False)
    with pytest.raises(StoreUnavailable) as caught:
        database.run("SELECT 1")
    assert str(caught.value).startswith("the database (host=127.0.0.1 port=")
    assert "dbname=runs user=me): cannot be reached: " in str(caught.value)
    assert str(caught.value).endswith("; start it, or let its failover end; this broker goes on by itself")
    assert "hunter2" not in str(caught.value)


def test_a_database_or_a_user_that_is_not_there_is_refused_at_the_start(postgres: SynchronousDatabase, schema: str) -> None:
    assert 'database "nowhere" does not exist' in refused(postgres, schema, dbname="nowhere")
    assert 'role "nobody" does not exist' in refused(postgres, schema, user="nobody")


def test_a_user_who_may_not_make_a_schema_is_refused_until_there_is_one(postgres: SynchronousDatabase, schema: str) -> None:
    postgres.server.sql(f"CREATE ROLE {schema}_user LOGIN")
    text = refused(postgres, schema, user=f"{schema}_user")
    assert f"user {schema}_user may not make a schema in it: GRANT CREATE ON DATABASE" in text
    postgres.server.sql(f"CREATE SCHEMA {schema} AUTHORIZATION {schema}_user")
    assert f"GRANT pg_read_all_stats TO {schema}_user" in refused(postgres, schema, user=f"{schema}_user")
    postgres.server.sql(f"GRANT pg_read_all_stats TO {schema}_user")
    with a_database(postgres, schema, user=f"{schema}_user") as database:
        assert open_log(database, fingerprint="f", run_id="run").run_id == "run"


def test_a_server_that_waits_for_nobody_is_refused(postgres: SynchronousDatabase, schema: str) -> None:
    try:
        postgres.server.setting("synchronous_standby_names", "")
        assert "its synchronous_standby_names is empty: " in refused(postgres, schema)
        allowed = Database(postgres.conninfo, schema, allow_asynchronous=True)
        assert open_log(allowed, fingerprint="f", run_id="run").run_id == "run"
        allowed.close()
    finally:
        postgres.server.setting("synchronous_standby_names", "*")


def test_a_server_that_is_read_only_is_waited_for(postgres: SynchronousDatabase, schema: str) -> None:
    parts = {"options": "'-c default_transaction_read_only=on'", "target_session_attrs": "any"}
    with a_database(postgres, schema, **parts) as database, pytest.raises(StoreUnavailable, match="the server is read-only"):
        open_log(database, fingerprint="f", run_id="run")


def test_a_log_of_another_run_or_release_is_refused(postgres: SynchronousDatabase, schema: str) -> None:
    with a_database(postgres, schema) as database:
        open_log(database, fingerprint="mine", run_id="run")
        with pytest.raises(DatabaseRefused, match=rf"schema {schema}: the run in it has fingerprint mine, "):
            open_log(database, fingerprint="other", run_id="run")
        postgres.server.sql(f"UPDATE {schema}.run SET ledger_schema = 4")
        with pytest.raises(DatabaseRefused, match=r"of another release \(format 1, schema 4; this one has 1 and 2\): "):
            open_log(database, fingerprint="mine", run_id="run")


def test_after_the_first_connection_a_server_that_is_not_ready_is_waited_for(
    postgres: SynchronousDatabase, schema: str
) -> None:
    """A failover may lead to a server that gets its settings a moment later."""
    log = opened_log(postgres, schema)
    try:
        postgres.server.setting("synchronous_standby_names", "")
        log.database.close()
        with pytest.raises(StoreUnavailable, match="its synchronous_standby_names is empty: "):
            log.append(ONE, FIRST, b"1")
    finally:
        postgres.server.setting("synchronous_standby_names", "*")
    log.append(ONE, FIRST, b"1")
    log.database.close()


def test_nothing_counts_that_was_committed_while_the_server_waited_for_nobody(
    postgres: SynchronousDatabase, schema: str
) -> None:
    log = opened_log(postgres, schema)
    try:
        postgres.server.setting("synchronous_standby_names", "")
        with pytest.raises(StoreUnavailable, match="nothing is acknowledged, because its synchronous_standby"):
            log.append(ONE, FIRST, b"1")
    finally:
        postgres.server.setting("synchronous_standby_names", "*")
    assert log.confirmed == 0
    log.append(ONE, FIRST, b"1")
    assert (log.confirmed, log.after(0, 9)) == (1, [(ONE, b"1")])
    log.database.close()


def test_a_commit_that_waits_for_a_standby_is_given_up_and_found_when_one_has_come(
    postgres: SynchronousDatabase, schema: str
) -> None:
    log = opened_log(postgres, schema, statement_s=1.0)
    postgres.witness.stop()
    try:
        with pytest.raises(StoreUnavailable, match=r"gave no answer within 1 s .* it may wait for a synchronous standby"):
            log.append(ONE, FIRST, b"1")
        with pytest.raises(StoreUnavailable, match="no synchronous standby is connected"):
            log.append(ONE, FIRST, b"1")
    finally:
        postgres.witness.start()
    log.append(ONE, FIRST, b"1")
    assert (log.confirmed, log.after(0, 9)) == (1, [(ONE, b"1")])
    log.database.close()


def test_a_full_disk_says_so_and_the_commit_succeeds_when_there_is_room(postgres: SynchronousDatabase, schema: str) -> None:
    log = opened_log(postgres, schema)
    postgres.server.sql(
        f"CREATE FUNCTION {schema}.no_room() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = '53100'; END $$"
    )
    postgres.server.sql(
        f"CREATE TRIGGER no_room BEFORE INSERT ON {schema}.commits FOR EACH ROW EXECUTE FUNCTION {schema}.no_room()"
    )
    with pytest.raises(StoreUnavailable, match="No space left on device; free space on its disk"):
        log.append(ONE, FIRST, b"1")
    postgres.server.sql(f"DROP TRIGGER no_room ON {schema}.commits")
    log.append(ONE, FIRST, b"1")
    assert log.confirmed == 1
    log.database.close()


def test_a_log_that_lost_a_commit_or_has_another_one_takes_no_more(postgres: SynchronousDatabase, schema: str) -> None:
    log = opened_log(postgres, schema)
    log.append(ONE, FIRST, b"1")
    postgres.server.sql(f"DELETE FROM {schema}.commits")
    with pytest.raises(LedgerDiverged, match=rf"its log is empty, and commit 1 with digest {ONE.digest} was acknowledged: "):
        log.append(TWO, ONE, b"2")
    log.append(ONE, FIRST, b"1")
    other = Commit(number=1, digest="another")
    with pytest.raises(LedgerDiverged, match=rf"commit 1 in it is another .*\(digest {ONE.digest}, here another\)"):
        log.append(other, FIRST, b"x")
    log.database.close()


def test_a_proxy_that_drops_idle_connections_goes_unnoticed(postgres: SynchronousDatabase, schema: str) -> None:
    with Relay(postgres.server.port) as relay:
        log = opened_log(postgres, schema, conninfo=postgres.conninfo.replace(str(postgres.server.port), str(relay.port)))
        log.append(ONE, FIRST, b"1")
        relay.cut()
        log.append(TWO, ONE, b"2")
        assert (log.confirmed, [commit for commit, _ in log.after(0, 9)]) == (2, [ONE, TWO])
        log.database.close()


def test_an_answer_that_is_lost_on_the_way_leaves_one_commit(postgres: SynchronousDatabase, schema: str) -> None:
    with Relay(postgres.server.port) as relay:
        log = opened_log(postgres, schema, conninfo=postgres.conninfo.replace(str(postgres.server.port), str(relay.port)))
        watch = relay.on(b"INSERT 0 1", relay.cut, direction="down")
        log.append(ONE, FIRST, b"1")
        assert watch.seen.is_set()
        assert (log.confirmed, log.after(0, 9)) == (1, [(ONE, b"1")])
        log.database.close()
