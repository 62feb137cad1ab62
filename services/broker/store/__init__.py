"""The durable log of one run: rows in SQLite, written in rounds and read again."""

from services.broker.store.archivable import groups_to_archive, next_archive
from services.broker.store.archive_file import (
    ARCHIVE_DIRECTORY,
    ArchiveDamaged,
    ArchiveFiles,
    ArchiveWriter,
    file_digest,
    held,
    remove_unrecorded,
)
from services.broker.store.payload import Payload, StoredChunk, chunk_checksum, stored_chunk
from services.broker.store.reader import LEDGER_FILE, NoLedger, Reader, StoreCorrupt, StoreMismatch, reading, refusing_damage
from services.broker.store.rewind import rewrite_ledger
from services.broker.store.store import RowChanges, Store, StoreUnavailable

__all__ = [
    "ARCHIVE_DIRECTORY",
    "LEDGER_FILE",
    "ArchiveDamaged",
    "ArchiveFiles",
    "ArchiveWriter",
    "NoLedger",
    "Payload",
    "Reader",
    "RowChanges",
    "Store",
    "StoreCorrupt",
    "StoreMismatch",
    "StoreUnavailable",
    "StoredChunk",
    "chunk_checksum",
    "file_digest",
    "groups_to_archive",
    "held",
    "next_archive",
    "reading",
    "refusing_damage",
    "remove_unrecorded",
    "rewrite_ledger",
    "stored_chunk",
]
