"""Brings a ledger forward by one schema: a copy first, then one transaction, so that a kill leaves the old or the new."""

import json
import os
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import msgspec

from gspo_services.broker.rows import Row
from gspo_services.broker.store.schema import CHECKSUM, CREATE, SCHEMA_VERSION, TABLES, Table, row_checksum

KEPT: Final = "ledger.schema{schema}.sqlite3"
"""Name of the copy of a ledger as it was before it was brought forward."""
_CREATES: Final = re.compile(r"CREATE (?:TABLE (\w+)|(?:UNIQUE )?INDEX \w+ ON (\w+))")


def other_schema(schema: int) -> str:
    """Why a ledger of this schema cannot be used as it is, and which release can."""
    known = f"schema {schema}, this release uses {SCHEMA_VERSION}"
    if schema > SCHEMA_VERSION:
        return (
            f"{known}: a newer release has written it. Update this broker first, and then what else is older; or put "
            f"{KEPT.format(schema=SCHEMA_VERSION)} beside it back, without what came since"
        )
    return (
        f"{known} and brings {SCHEMA_VERSION - 1} forward: start the broker once with each release in between, continue "
        "the run with the release that began it, or choose another run.directory"
    )


def bring_forward(path: Path) -> Path | None:
    """If the ledger is of the schema before this release's, keep a copy beside it and rewrite it. Nobody else has it open.

    Returns the copy; None when there was nothing to do. Raises: ValueError for a row that the disk has changed or that this
    release cannot have (nothing is changed then); sqlite3.Error; OSError, when there is no room for the copy, for example.
    """
    if not path.is_file() or not path.stat().st_size or (schema := _schema(path)) != SCHEMA_VERSION - 1:
        return None
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        copy = path.with_name(KEPT.format(schema=schema))
        if not copy.exists():
            _keep(connection, copy)
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("BEGIN IMMEDIATE")
        try:
            _rewrite(connection)
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")
    return copy


def _schema(path: Path) -> int:
    """Read-only: whoever closes a ledger that can be written merges its log."""
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _keep(connection: sqlite3.Connection, copy: Path) -> None:
    """Copy the ledger with what is in its log. The copy gets its name when it is whole and on the disk."""
    part = copy.with_name(f"{copy.name}.part")
    part.unlink(missing_ok=True)
    with closing(sqlite3.connect(part)) as target:
        connection.backup(target)
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.rename(copy)
    directory = os.open(copy.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _rewrite(connection: sqlite3.Connection) -> None:
    """Make every table one of this release. One whose columns are the same is not touched: tokens are most of a ledger."""
    created: dict[str, list[str]] = {}
    for statement in CREATE.split(";"):
        if match := _CREATES.search(statement):
            created.setdefault(match[1] or match[2], []).append(statement)
    tables = {table.name: table for table in TABLES.values()}
    with closing(sqlite3.connect(":memory:")) as empty:
        empty.executescript(CREATE)
        columns = {name: _columns(empty, name) for name in created}
    for name, statements in created.items():
        old = _columns(connection, name)
        if not old:
            for statement in statements:
                connection.execute(statement)
        elif old != columns[name]:
            _rewrite_table(connection, tables[name], old, statements)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _columns(connection: sqlite3.Connection, name: str) -> list[str]:
    return [row[1] for row in connection.execute(f"PRAGMA table_info({name})")]


def _rewrite_table(connection: sqlite3.Connection, table: Table, old: list[str], statements: list[str]) -> None:
    indexes = connection.execute(
        "SELECT name FROM sqlite_master WHERE type = 'index' AND tbl_name = ? AND sql IS NOT NULL", (table.name,)
    ).fetchall()
    for (index,) in indexes:
        connection.execute(f"DROP INDEX {index}")
    connection.execute(f"ALTER TABLE {table.name} RENAME TO old_{table.name}")
    for statement in statements:
        connection.execute(statement)
    for stored in connection.execute(f"SELECT {', '.join(old)} FROM old_{table.name}"):
        connection.execute(table.insert, table.values(_row(table, old, stored)))
    connection.execute(f"DROP TABLE old_{table.name}")


def _row(table: Table, old: list[str], stored: tuple[Any, ...]) -> Row:
    """The row of this release: what the old one had, and defaults. Raises: ValueError."""
    *columns, checksum = stored
    if old[-1] != CHECKSUM or row_checksum(table.name, tuple(columns)) != checksum:
        raise ValueError(f"{table.name}: {columns!r:.200} was changed on the disk: its checksum is another")
    field_of = dict(zip(table.columns, table.fields, strict=True))
    if unknown := set(old[:-1]) - set(field_of):
        raise ValueError(f"{table.name}: this release has no {', '.join(sorted(unknown))}, and no rule what becomes of it")
    plain = {
        field_of[column]: json.loads(value) if field_of[column] in table.json_fields else value
        for column, value in zip(old, columns, strict=False)
    }
    return msgspec.convert(plain, table.row_type)
