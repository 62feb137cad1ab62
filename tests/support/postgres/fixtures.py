"""Fixtures of a database: one server for a whole session, a schema for each test."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.support.postgres.server import PostgresServer, Witness, postgres_folder, programs

_numbers = itertools.count()


@dataclass(frozen=True)
class SynchronousDatabase:
    """A server, and what it waits for."""

    server: PostgresServer
    witness: Witness

    @property
    def conninfo(self) -> str:
        return self.server.conninfo


@pytest.fixture(scope="session")
def postgres() -> Iterator[SynchronousDatabase]:
    """A server that waits for a second disk with each commit."""
    if programs() is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    with postgres_folder() as folder:
        server = PostgresServer(folder, "primary")
        server.make()
        server.start()
        witness = Witness(server)
        try:
            server.setting("synchronous_standby_names", "*")
            witness.start()
            yield SynchronousDatabase(server, witness)
        finally:
            witness.stop()
            server.stop()


@pytest.fixture
def schema() -> str:
    """A name that no other test has. A broker adds its number to it."""
    return f"run{next(_numbers)}"
