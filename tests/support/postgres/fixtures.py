"""Fixtures of a database: one server for a whole session, a schema for each test."""

import contextlib
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

    def crash(self) -> None:
        """Kill the server, and start it again on its disk."""
        self.witness.stop()
        self.server.kill()
        self.server.start()
        self.witness.start()


@contextlib.contextmanager
def synchronous_database() -> Iterator[SynchronousDatabase]:
    """A server that waits for a second disk with each commit."""
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


@pytest.fixture(scope="session")
def postgres() -> Iterator[SynchronousDatabase]:
    """See ``synchronous_database``."""
    if programs() is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    with synchronous_database() as database:
        yield database


@pytest.fixture
def schema() -> str:
    """A name that no other test has. A broker adds its number to it."""
    return f"run{next(_numbers)}"
