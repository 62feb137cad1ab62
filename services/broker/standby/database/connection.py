"""One connection to PostgreSQL: made when it is needed, given up when it fails, and never waited for without an end."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NoReturn, TypeVar

import psycopg
from psycopg import errors as pg_errors
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from gspo_services.broker.standby.database.checks import FACTS, ServerFacts, refusal, waiting
from gspo_services.broker.standby.database.commit_wait import (
    AFTER,
    LOCK_MS,
    PREPARE,
    WAITING_LEVELS,
    CommitState,
    doubt_of,
    unproven,
)
from gspo_services.broker.standby.database.deadline import Deadline
from gspo_services.broker.standby.database.errors import SETTING, UNREADABLE, DatabaseRefused, needs_a_person, way_out
from gspo_services.broker.store import StoreUnavailable

STATEMENT_S: Final = 10.0
"""How long an answer is waited for. A commit waits in the server for its synchronous standby, without any end of its own."""
DEFAULTS: Final[dict[str, str]] = {
    "connect_timeout": "3",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
    "tcp_user_timeout": "10000",
    "target_session_attrs": "read-write",
    "application_name": "gspo-broker",
}
"""A host that vanishes is noticed within seconds. What the user's string says comes before these."""
T = TypeVar("T")


class Database:
    """A connection that makes itself again. Not thread-safe: each thread has its own."""

    def __init__(self, conninfo: str, schema: str, *, allow_asynchronous: bool, statement_s: float = STATEMENT_S) -> None:
        """``schema``: of the run's tables. ``statement_s``: how long one statement may take.

        Raises: DatabaseRefused when ``conninfo`` cannot be read.
        """
        try:
            given = conninfo_to_dict(conninfo)
        except psycopg.Error:
            # Not ``from``: libpq quotes what it could not read, which may be a password.
            raise DatabaseRefused(UNREADABLE) from None
        self._conninfo = make_conninfo("", **{**DEFAULTS, **given})
        self.schema = schema
        self.allow_asynchronous = allow_asynchronous
        self.where = _shown(given)
        self._statement_s = statement_s
        self._connection: psycopg.Connection[tuple[Any, ...]] | None = None
        self._warnings: list[str] = []
        """What the server warned of during the last statement."""
        self._has_worked = False

    def run(self, statement: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run one statement, which is a transaction of its own. Returns its rows.

        Raises: StoreUnavailable when its outcome is not known, or it failed for now; DatabaseRefused when a person has to
        change something; psycopg.IntegrityError as it is.
        """
        return self._again(lambda connection: _rows(connection.execute(statement.encode(), parameters)))

    def commit(self, statement: str, parameters: Sequence[Any] = ()) -> tuple[list[tuple[Any, ...]], str]:
        """As ``run``, for what counts only once a second machine has it. Returns its rows, and why that is not certain;
        empty when it is."""
        return self._again(lambda connection: self._committed(connection, statement, parameters))

    def _committed(
        self, connection: psycopg.Connection[tuple[Any, ...]], statement: str, parameters: Sequence[Any]
    ) -> tuple[list[tuple[Any, ...]], str]:
        """All in one round trip. The server reads changed settings between two messages, also between those of one
        transaction; what the transaction has set for itself stays."""
        waits = not self.allow_asynchronous
        with connection.pipeline():
            connection.execute(b"BEGIN")
            before = connection.execute(PREPARE.encode(), (waits,))
            cursor = connection.execute(statement.encode(), parameters)
            connection.execute(b"COMMIT")
            after = connection.execute(AFTER.encode())
        rows = _rows(cursor)
        if not (waits and rows):
            return rows, ""
        (*first, _, level), (*last, proven) = _rows(before)[0], _rows(after)[0]
        if level not in WAITING_LEVELS:
            return rows, f"its synchronous_commit stays {level}"
        state = CommitState(*last)
        doubt = doubt_of(CommitState(*first), state) or unproven(connection, state, proven=proven)
        return rows, "; ".join([doubt, *self._warnings]) if doubt else ""

    def _again(self, work: Callable[[psycopg.Connection[tuple[Any, ...]]], T]) -> T:
        # A proxy drops connections that were idle: the next statement finds that out, and nothing is wrong.
        was_open = self._connection is not None
        try:
            return self._once(work)
        except _Broken as broken:
            if was_open and not broken.expired:
                try:
                    return self._once(work)
                except _Broken as again:
                    broken = again
            raise broken.unavailable from broken.unavailable.__cause__

    def _once(self, work: Callable[[psycopg.Connection[tuple[Any, ...]]], T]) -> T:
        connection = self.connected()
        self._warnings.clear()
        deadline = Deadline(connection.fileno(), self._statement_s)
        try:
            with deadline:
                return work(connection)
        except psycopg.IntegrityError:
            self.close()
            raise
        except (pg_errors.InsufficientPrivilege, pg_errors.UndefinedTable, pg_errors.InvalidSchemaName) as error:
            self.close()
            text = f"{self.where}: {_text(error)}: give the broker's user its schema {self.schema} back"
            raise DatabaseRefused(text) from error
        except psycopg.Error as error:
            self.close()
            if deadline.expired:
                raise _Broken(self._without_answer(error), expired=True) from error
            if error.sqlstate is None:
                raise _Broken(self._unavailable(error), expired=False) from error
            raise self._unavailable(error) from error

    def connected(self) -> psycopg.Connection[tuple[Any, ...]]:
        """The connection, made and checked if there is none. Raises: as ``run``."""
        if self._connection is None:
            connection = self._connect()
            try:
                self._check(connection)
            except psycopg.Error as error:
                connection.close()
                raise self._unavailable(error) from error
            except BaseException:
                connection.close()
                raise
            connection.add_notice_handler(self._on_notice)
            self._connection = connection
        return self._connection

    @contextmanager
    def transaction(self) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
        """Several statements as one, within the time of one. Raises: as ``run``; psycopg.Error of the block as it is."""
        connection = self.connected()
        with Deadline(connection.fileno(), self._statement_s), connection.transaction():
            connection.execute(f"SET LOCAL lock_timeout = {LOCK_MS}".encode())
            yield connection

    def close(self) -> None:
        if self._connection is not None:
            with suppress(psycopg.Error):
                self._connection.close()
            self._connection = None

    def _connect(self) -> psycopg.Connection[tuple[Any, ...]]:
        try:
            return psycopg.connect(self._conninfo, autocommit=True, prepare_threshold=None)
        except psycopg.OperationalError as error:
            text = _text(error)
            if needs_a_person(text) and not self._has_worked:
                raise DatabaseRefused(f"{SETTING}: {self.where}: {text}") from error
            raise StoreUnavailable(f"{self.where}: cannot be reached: {text}; {way_out(None)}") from error

    def _check(self, connection: psycopg.Connection[tuple[Any, ...]]) -> None:
        with Deadline(connection.fileno(), self._statement_s):
            found = connection.execute(FACTS.encode(), (self.schema,)).fetchone()
        assert found is not None
        facts = ServerFacts(**dict(zip(ServerFacts.__dataclass_fields__, found, strict=True)))
        if reason := waiting(facts, allow_asynchronous=self.allow_asynchronous):
            raise StoreUnavailable(f"{self.where}: {reason}")
        if reason := refusal(facts, allow_asynchronous=self.allow_asynchronous):
            self._refuse(reason)
        self._has_worked = True

    def _refuse(self, reason: str) -> NoReturn:
        """At the start a person is there to read it. Later a failover may lead to a server that is not ready yet."""
        if self._has_worked:
            raise StoreUnavailable(f"{self.where}: {reason}")
        raise DatabaseRefused(f"{SETTING}: {self.where}: {reason}")

    def _on_notice(self, notice: psycopg.errors.Diagnostic) -> None:
        if notice.severity_nonlocalized == "WARNING":
            self._warnings.append(notice.message_primary or "")

    def _unavailable(self, error: psycopg.Error) -> StoreUnavailable:
        return StoreUnavailable(f"{self.where}: {_text(error)}; {way_out(error.sqlstate)}")

    def _without_answer(self, error: psycopg.Error) -> StoreUnavailable:
        return StoreUnavailable(
            f"{self.where}: gave no answer within {self._statement_s:g} s ({_text(error)}): it may wait for a synchronous "
            "standby, see pg_stat_replication; start one again"
        )


class _Broken(Exception):
    """The connection ended during a statement: its outcome is unknown."""

    def __init__(self, unavailable: StoreUnavailable, *, expired: bool) -> None:
        super().__init__(str(unavailable))
        self.unavailable = unavailable
        self.expired = expired


def _rows(cursor: psycopg.Cursor[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return cursor.fetchall() if cursor.description is not None else []


def _shown(given: dict[str, Any]) -> str:
    """Which database it is, without what is secret."""
    parts = [f"{key}={given[key]}" for key in ("host", "port", "dbname", "user", "service") if given.get(key)]
    return f"the database ({' '.join(parts) or 'of the environment'})"


def _text(error: psycopg.Error) -> str:
    """The server's words on one line, without the hint that follows them."""
    return " ".join((error.diag.message_primary or str(error)).split())
