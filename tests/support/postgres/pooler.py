"""A real PgBouncer before a test's server."""

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg

from tests.support.postgres.server import START_S, PostgresServer, as_postgres, postgres_folder
from tests.support.processes.ports import free_port


def pooler_program() -> Path | None:
    """None where it is not installed."""
    found = shutil.which("pgbouncer", path="/usr/sbin:/usr/bin:/usr/local/bin")
    return Path(found) if found else None


@contextlib.contextmanager
def pooler(server: PostgresServer, mode: str) -> Iterator[str]:
    """Yields a connection string. ``mode``: what a client keeps its session for: session, transaction, statement."""
    port = free_port()
    with postgres_folder() as folder:
        (folder / "users.txt").write_text('"postgres" ""\n')
        (folder / "pooler.ini").write_text(
            f"[databases]\npostgres = host=127.0.0.1 port={server.port}\n[pgbouncer]\nlisten_addr = 127.0.0.1\n"
            f"listen_port = {port}\nauth_type = trust\nauth_file = {folder}/users.txt\npool_mode = {mode}\n"
            f"unix_socket_dir =\nlogfile = {folder}/pooler.log\n"
        )
        command = as_postgres(str(pooler_program()), str(folder / "pooler.ini"))
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/")
        try:
            conninfo = f"host=127.0.0.1 port={port} dbname=postgres user=postgres"
            _wait_for(conninfo)
            yield conninfo
        finally:
            process.terminate()
            process.wait(START_S)


def _wait_for(conninfo: str) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            psycopg.connect(conninfo, connect_timeout=5).close()
            return
        except psycopg.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
