"""The tables of one run's log, in a schema of their own."""

from typing import Final

import msgspec
import psycopg

from gspo_services.broker.standby.database.connection import Database
from gspo_services.broker.standby.database.errors import SETTING, DatabaseRefused, needs_a_person
from gspo_services.broker.store import SCHEMA_VERSION, StoreUnavailable

FORMAT: Final = 1
"""Of these tables."""
CREATE: Final = """
CREATE TABLE IF NOT EXISTS {schema}.run (
    id int PRIMARY KEY DEFAULT 0 CHECK (id = 0), run_id text NOT NULL, fingerprint text NOT NULL, ledger_schema int NOT NULL,
    format int NOT NULL, made_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE TABLE IF NOT EXISTS {schema}.leader (
    id int PRIMARY KEY DEFAULT 0 CHECK (id = 0), epoch bigint NOT NULL, holder text NOT NULL, renewals bigint NOT NULL,
    confirmed bigint NOT NULL, released boolean NOT NULL, renewed_at timestamptz NOT NULL
);
CREATE TABLE IF NOT EXISTS {schema}.commits (
    number bigint PRIMARY KEY, epoch bigint NOT NULL, digest text NOT NULL, chunks bigint NOT NULL, tokens bigint NOT NULL,
    batches bigint NOT NULL, lines bigint NOT NULL, content bytea NOT NULL,
    made_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
ALTER TABLE {schema}.commits ALTER content SET STORAGE EXTERNAL;
"""
"""leader: one row; ``epoch`` fences, ``renewals`` grows while its holder lives, commits up to ``confirmed`` are on two
machines. commits: the content is of random bits for the most part, so the server need not try to compress it.
"""


class LoggedRun(msgspec.Struct, frozen=True):
    """Whose log it is."""

    run_id: str
    fingerprint: str
    ledger_schema: int
    format: int


def open_log(database: Database, *, fingerprint: str, run_id: str) -> LoggedRun:
    """The run of the log, which is begun with ``run_id`` if there is none.

    Raises: DatabaseRefused when the log is of another run, configuration or release; StoreUnavailable.
    """
    found = _run(database)
    if found is None:
        _create(database, fingerprint, run_id)
        found = _run(database)
        if found is None:
            raise StoreUnavailable(f"{database.where}: schema {database.schema} has no run in it; somebody removes it")
    where = f"{SETTING}: {database.where}, schema {database.schema}"
    if (found.format, found.ledger_schema) != (FORMAT, SCHEMA_VERSION):
        raise DatabaseRefused(
            f"{where}: its log is of another release (format {found.format}, schema {found.ledger_schema}; this one has "
            f"{FORMAT} and {SCHEMA_VERSION}): continue with that release, or choose another broker.database_schema for a "
            "new run"
        )
    if found.fingerprint != fingerprint:
        raise DatabaseRefused(
            f"{where}: the run in it has fingerprint {found.fingerprint}, the configuration {fingerprint}: it is another "
            "run, or seed, model, environment, reward.on_deadline or batch settings were changed. Change them back, or "
            "choose another broker.database_schema"
        )
    return found


def _run(database: Database) -> LoggedRun | None:
    (exists,) = database.run("SELECT to_regclass(quote_ident(%s) || '.run') IS NOT NULL", (database.schema,))[0]
    if not exists:
        return None
    rows = database.run(f"SELECT run_id, fingerprint, ledger_schema, format FROM {database.schema}.run")
    return LoggedRun(*rows[0]) if rows else None


def _create(database: Database, fingerprint: str, run_id: str) -> None:
    """Two brokers that start at once make it once: the second one waits for the first, and finds it."""
    schema = database.schema
    try:
        with database.transaction() as connection:
            connection.execute(b"SELECT pg_advisory_xact_lock(hashtext(%s))", (schema,))
            # IF NOT EXISTS needs the right to make one, also where it exists.
            if connection.execute(b"SELECT to_regnamespace(quote_ident(%s)) IS NULL", (schema,)).fetchone() == (True,):
                connection.execute(f"CREATE SCHEMA {schema}".encode())
            for statement in CREATE.format(schema=schema).split(";"):
                if statement.strip():
                    connection.execute(statement.encode())
            connection.execute(
                f"INSERT INTO {schema}.run (run_id, fingerprint, ledger_schema, format) VALUES (%s, %s, %s, %s) "
                "ON CONFLICT DO NOTHING".encode(),
                (run_id, fingerprint, SCHEMA_VERSION, FORMAT),
            )
            connection.execute(
                f"INSERT INTO {schema}.leader (epoch, holder, renewals, confirmed, released, renewed_at) "
                "VALUES (0, '', 0, 0, true, clock_timestamp()) ON CONFLICT DO NOTHING".encode()
            )
    except psycopg.errors.InsufficientPrivilege as error:
        database.close()
        raise DatabaseRefused(
            f"{SETTING}: {database.where}: {error.diag.message_primary}: give schema {schema} to the broker's user"
        ) from error
    except psycopg.Error as error:
        database.close()
        text = f"{database.where}: schema {schema} cannot be made: {error.diag.message_primary or error}"
        if needs_a_person(text):
            raise DatabaseRefused(f"{SETTING}: {text}") from error
        raise StoreUnavailable(text) from error
