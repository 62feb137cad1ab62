"""The durable log of one run: rows in SQLite, written in rounds and read again."""

from services.broker.store.payload import Payload, StoredChunk, chunk_checksum, stored_chunk
from services.broker.store.reader import LEDGER_FILE, NoLedger, Reader, StoreCorrupt, StoreMismatch, reading, refusing_damage
from services.broker.store.store import RowChanges, Store, StoreUnavailable

__all__ = [
    "LEDGER_FILE",
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
    "reading",
    "refusing_damage",
    "stored_chunk",
]
