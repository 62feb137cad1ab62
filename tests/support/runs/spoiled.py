"""Damage in a run's ledger."""

import sqlite3
from pathlib import Path

import msgpack

from gspo_services.broker.store.reader import LEDGER_FILE

# Headers for a chunk of three tokens: segments that cover one, versions for two.
FORGED = {
    "short_segments": [[["action", 0, 1]], [[1, 3]], None, False, []],
    "unversioned": [[["action", 0, 3]], [[1, 2], [-1, 1]], None, False, []],
}


def spoil(directory: Path, *statements: str) -> None:
    connection = sqlite3.connect(directory / LEDGER_FILE)
    connection.create_function("flip", 1, lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    for name, header in FORGED.items():
        connection.create_function(name, 0, lambda header=header: msgpack.packb(header))
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()
