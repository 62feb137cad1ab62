"""The durable log of one run: rows in SQLite, written in rounds and read again."""

from gspo_services.broker.store.acceptance import accept_loss, forget_commits
from gspo_services.broker.store.archivable import batches_to_archive, groups_to_archive, next_archive
from gspo_services.broker.store.archive_file import (
    ARCHIVE_DIRECTORY,
    ArchiveDamaged,
    ArchiveFiles,
    ArchiveWriter,
    file_digest,
    held,
    remove_unrecorded,
)
from gspo_services.broker.store.commit_log import CommitLog, LedgerDiverged
from gspo_services.broker.store.commits import Commit
from gspo_services.broker.store.damage import (
    WAL_SUFFIX,
    Evidence,
    Loss,
    StoreDamaged,
    loss_of,
    loss_without_ledger,
    read_evidence,
    stale_mark,
)
from gspo_services.broker.store.inspection import has_content, mark_ledger, recorded, require_whole
from gspo_services.broker.store.lock import lock_holder
from gspo_services.broker.store.mark import MARK_FILE, read_mark
from gspo_services.broker.store.payload import (
    ChunkHeader,
    Payload,
    StoredChunk,
    checked_chunks,
    chunk_checksum,
    chunk_header,
    join,
    stored_chunk,
    stored_chunks,
)
from gspo_services.broker.store.reader import (
    LEDGER_FILE,
    NoLedger,
    OtherSchema,
    Reader,
    ReaderGaveWay,
    StoreCorrupt,
    StoreMismatch,
    reading,
    refusing_damage,
)
from gspo_services.broker.store.rewind import count_requeued, rewrite_ledger
from gspo_services.broker.store.schema import SCHEMA_VERSION, checked_columns, row_checksum
from gspo_services.broker.store.scrub import Scrub, Scrubbed
from gspo_services.broker.store.store import RowChanges, Store, StoreUnavailable
from gspo_services.broker.store.written_rows import WrittenRows, decode_rows, encode_rows

__all__ = [
    "ARCHIVE_DIRECTORY",
    "LEDGER_FILE",
    "MARK_FILE",
    "SCHEMA_VERSION",
    "WAL_SUFFIX",
    "ArchiveDamaged",
    "ArchiveFiles",
    "ArchiveWriter",
    "ChunkHeader",
    "Commit",
    "CommitLog",
    "Evidence",
    "LedgerDiverged",
    "Loss",
    "NoLedger",
    "OtherSchema",
    "Payload",
    "Reader",
    "ReaderGaveWay",
    "RowChanges",
    "Scrub",
    "Scrubbed",
    "Store",
    "StoreCorrupt",
    "StoreDamaged",
    "StoreMismatch",
    "StoreUnavailable",
    "StoredChunk",
    "WrittenRows",
    "accept_loss",
    "batches_to_archive",
    "checked_chunks",
    "checked_columns",
    "chunk_checksum",
    "chunk_header",
    "count_requeued",
    "decode_rows",
    "encode_rows",
    "file_digest",
    "forget_commits",
    "groups_to_archive",
    "has_content",
    "held",
    "join",
    "lock_holder",
    "loss_of",
    "loss_without_ledger",
    "mark_ledger",
    "next_archive",
    "read_evidence",
    "read_mark",
    "reading",
    "recorded",
    "refusing_damage",
    "remove_unrecorded",
    "require_whole",
    "rewrite_ledger",
    "row_checksum",
    "stale_mark",
    "stored_chunk",
    "stored_chunks",
]
