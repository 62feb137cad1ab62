"""The rows of one commit, as SQLite gets them and as bytes: a copy that writes them holds the same, to the bit.

Columns travel, not the structs that they come from: whoever made them has turned 1 into 1.0 or not, and a copy must not
decide that again. Every row ends with its checksum, and the commit's digest covers all of these.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, Final

import msgspec

from gspo_services.broker.rows import Row, RunRow, TrajectoryRow
from gspo_services.broker.store.commits import Commit
from gspo_services.broker.store.payload import StoredChunk, chunk_checksum
from gspo_services.broker.store.schema import RUN_KEY, SCHEMA_VERSION, TABLES, row_checksum

META: Final = "meta"
METRICS_LINES: Final = "metrics_lines"
BATCHES: Final = "batches"
ARCHIVED: Final = "archived"
Columns = tuple[Any, ...]


class WrittenRows(msgspec.Struct, frozen=True, array_like=True):
    """What one commit writes. Of several rows with the same key the last one counts."""

    schema: int
    """SCHEMA_VERSION of the release that wrote it."""
    tables: list[tuple[str, list[Columns]]]
    """Rows by table, in the order in which they are written; their last column is the checksum."""
    chunks: list[StoredChunk]
    lines: list[Columns]
    """Lines of metrics.jsonl."""

    @property
    def archived_groups(self) -> list[int]:
        """Groups whose tokens have moved to an archive file."""
        return [values[0] for table, rows in self.tables if table == ARCHIVED for values in rows]

    def commit_after(self, before: Commit) -> Commit:
        """The commit that these rows make of a ledger that stood at ``before``."""
        checksums: list[int] = [values[-1] for _, rows in self.tables for values in rows]
        checksums += [chunk.checksum for chunk in self.chunks]
        checksums += [values[-1] for values in self.lines]
        return before.next(
            checksums,
            chunks=len(self.chunks),
            tokens=sum(chunk.num_tokens for chunk in self.chunks),
            batches=sum(len(rows) for table, rows in self.tables if table == BATCHES),
            lines=len(self.lines),
        )


def rendered(rows: Sequence[Row], chunks: Sequence[StoredChunk], lines: Sequence[str], first_line: int) -> WrittenRows:
    """The columns of ``rows``; ``lines`` are numbered from ``first_line`` on."""
    by_type: dict[type[Row], list[Row]] = {}
    for row in rows:
        by_type.setdefault(type(row), []).append(row)
    tables: list[tuple[str, list[Columns]]] = []
    for row_type, all_rows in by_type.items():
        if row_type is RunRow:
            values: Columns = (RUN_KEY, msgspec.json.encode(all_rows[-1]).decode())
            tables.append((META, [(*values, row_checksum(META, values))]))
        else:
            table = TABLES[row_type]
            wanted = _last_of_each(all_rows) if row_type is TrajectoryRow else all_rows
            tables.append((table.name, [table.values(row) for row in wanted]))
    numbered = [(*values, row_checksum(METRICS_LINES, values)) for values in enumerate(lines, start=first_line)]
    return WrittenRows(schema=SCHEMA_VERSION, tables=tables, chunks=list(chunks), lines=numbered)


def _last_of_each(rows: Sequence[Row]) -> list[Row]:
    """Of several rows of a trajectory, which many chunks in one round make, the last one."""
    return list({row.trajectory_id: row for row in rows if isinstance(row, TrajectoryRow)}.values())


def encode_rows(written: WrittenRows) -> bytes:
    """As msgpack."""
    return _ENCODER.encode(written)


def decode_rows(content: bytes) -> WrittenRows:
    """What ``encode_rows`` made. Raises: ValueError when it is something else, or of another schema."""
    written = _DECODER.decode(content)
    if written.schema != SCHEMA_VERSION:
        raise ValueError(f"rows of schema {written.schema}, this release has schema {SCHEMA_VERSION}")
    return written


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(WrittenRows)


def require_sound(written: WrittenRows) -> None:
    """Check each row against its checksum. Raises: ValueError with the first one that was changed."""
    known = {META, *(table.name for table in TABLES.values())}
    for name, rows in chain(written.tables, [(METRICS_LINES, written.lines)]):
        if name not in known and name != METRICS_LINES:
            raise ValueError(f"there is no table {name!r:.40}")
        for *columns, checksum in rows:
            if row_checksum(name, tuple(columns)) != checksum:
                raise ValueError(f"a row of {name} was changed: {columns!r:.200}")
    for chunk in written.chunks:
        place = (chunk.trajectory_id, chunk.start, chunk.epoch, chunk.num_tokens)
        if chunk_checksum(place, chunk.header, chunk.token_ids, chunk.logprobs) != chunk.checksum:
            raise ValueError(f"the chunk at {chunk.start} of trajectory {chunk.trajectory_id} was changed")
