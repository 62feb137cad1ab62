"""Real PostgreSQL servers for tests: made, started, killed, promoted, in temporary folders and on ports of their own."""

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import psycopg

from tests.support.processes.ports import free_port

DEBIAN: Final = Path("/usr/lib/postgresql")
START_S: Final = 60.0
SETTINGS: Final = {
    "shared_buffers": "16MB",
    "max_connections": "40",
    "max_wal_senders": "8",
    "max_replication_slots": "8",
    "wal_keep_size": "256MB",
    "min_wal_size": "32MB",
    "max_wal_size": "256MB",
    "autovacuum": "off",
    "log_min_messages": "warning",
    "wal_retrieve_retry_interval": "200ms",
    "wal_receiver_timeout": "5s",
    "wal_sender_timeout": "5s",
    "hot_standby": "on",
}


def programs() -> Path | None:
    """The folder of PostgreSQL's programs; None where it is not installed."""
    found = shutil.which("postgres")
    if found is not None:
        return Path(found).resolve().parent
    newest = sorted(DEBIAN.glob("*/bin/postgres"))
    return newest[-1].parent if newest else None


def as_postgres(*command: str) -> list[str]:
    """Root's commands as another user: the server refuses to run as root."""
    if os.getuid():
        return list(command)
    return ["setpriv", "--reuid=postgres", "--regid=postgres", "--init-groups", *command]


@contextlib.contextmanager
def postgres_folder() -> Iterator[Path]:
    """A temporary folder that the server's user may use."""
    if not os.getuid():
        for above in (Path(tempfile.gettempdir()), *Path(tempfile.gettempdir()).parents):
            if above.stat().st_uid == 0 and not above.stat().st_mode & 0o001:
                above.chmod(above.stat().st_mode | 0o011)
    folder = Path(tempfile.mkdtemp(prefix="postgres-"))
    if not os.getuid():
        account = pwd.getpwnam("postgres")
        os.chown(folder, account.pw_uid, account.pw_gid)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


class PostgresServer:
    """One server. ``name`` is what it calls itself to the one that it follows."""

    def __init__(self, folder: Path, name: str, port: int = 0, **settings: str) -> None:
        self.name = name
        self.data = folder / name
        self.port = port or free_port()
        self._folder = folder
        self._settings = {**SETTINGS, **settings}
        self._process: subprocess.Popen[bytes] | None = None
        self._programs = programs()

    @property
    def conninfo(self) -> str:
        """For a client."""
        return f"host=127.0.0.1 port={self.port} dbname=postgres user=postgres"

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def make(self) -> None:
        """A new, empty database."""
        self._call(
            "initdb", "-D", str(self.data), "-U", "postgres", "-A", "trust", "--no-sync", "--no-instructions", "-E", "UTF8"
        )

    def copy_from(self, primary: "PostgresServer") -> None:
        """Become a standby of ``primary``; what was here is thrown away."""
        shutil.rmtree(self.data, ignore_errors=True)
        self._call(
            "pg_basebackup", "-D", str(self.data), "-R", "-X", "stream", "-c", "fast", "--no-sync", "-d", primary.conninfo
        )
        self.follow(primary)

    def follow(self, primary: "PostgresServer") -> None:
        """Take ``primary`` for the server to follow, from now or from the next start on."""
        text = f"host=127.0.0.1 port={primary.port} user=postgres application_name={self.name}"
        if self.alive:
            self.sql(f"ALTER SYSTEM SET primary_conninfo = '{text}'")
            self.sql("SELECT pg_reload_conf()")
        else:
            with (self.data / "postgresql.auto.conf").open("a") as file:
                file.write(f"primary_conninfo = '{text}'\n")

    def start(self) -> None:
        """Start, and wait until it answers."""
        assert self._programs is not None
        options = {**self._settings, "port": str(self.port), "unix_socket_directories": str(self._folder)}
        options["listen_addresses"] = "127.0.0.1"
        arguments = [each for key, value in options.items() for each in ("-c", f"{key}={value}")]
        command = as_postgres(str(self._programs / "postgres"), "-D", str(self.data), *arguments)
        log = (self._folder / f"{self.name}.log").open("ab")
        with log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd="/")
        deadline = time.monotonic() + START_S
        while True:
            try:
                self.sql("SELECT 1")
                return
            except psycopg.OperationalError:
                if not self.alive or time.monotonic() > deadline:
                    raise RuntimeError((self._folder / f"{self.name}.log").read_text()[-4000:]) from None
            time.sleep(0.05)

    def kill(self) -> None:
        """All its processes at once, as when its machine loses power but not its disk."""
        assert self._process is not None
        import psutil

        root = psutil.Process(self._process.pid)
        everyone = [root, *root.children(recursive=True)]
        for process in everyone:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(everyone[1:], timeout=START_S)
        self._process.wait(START_S)

    def stop(self) -> None:
        """Stop without a checkpoint, if it runs."""
        if self.alive:
            assert self._process is not None
            self._process.send_signal(subprocess.signal.SIGQUIT)  # type: ignore[attr-defined]
            self._process.wait(START_S)

    def promote(self) -> None:
        self.sql("SELECT pg_promote(true)")

    def sql(self, statement: str, conninfo: str = "") -> list[tuple[Any, ...]]:
        """Run one statement. Returns its rows."""
        with psycopg.connect(conninfo or self.conninfo, autocommit=True, connect_timeout=5) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description is not None else []

    def setting(self, name: str, value: str) -> None:
        """Change a setting of the running server."""
        self.sql(f"ALTER SYSTEM SET {name} = '{value}'")
        self.sql("SELECT pg_reload_conf()")
        deadline = time.monotonic() + START_S
        while self.sql(f"SHOW {name}") != [(value,)]:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def reset(self, name: str) -> None:
        """Undo ``setting``; its default has to be "on" or "off"."""
        ((default,),) = self.sql(f"SELECT boot_val FROM pg_settings WHERE name = '{name}'")
        self.setting(name, default)
        self.sql(f"ALTER SYSTEM RESET {name}")

    def _call(self, program: str, *arguments: str) -> None:
        assert self._programs is not None
        command = as_postgres(str(self._programs / program), *arguments)
        done = subprocess.run(command, capture_output=True, text=True, cwd="/", check=False)
        if done.returncode:
            raise RuntimeError(f"{program}: {done.stderr}")


class Witness:
    """The second machine, without a server: it keeps the write-ahead log, and confirms what it has on its disk."""

    def __init__(self, server: PostgresServer, name: str = "witness") -> None:
        self._server = server
        self._name = name
        self.folder = server.data.with_name(f"{server.name}-{name}")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of its process, which was started."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start, and wait until the server counts it as synchronous."""
        binary = programs()
        assert binary is not None
        if not self.folder.exists():
            self.folder.mkdir()
            if not os.getuid():
                account = pwd.getpwnam("postgres")
                os.chown(self.folder, account.pw_uid, account.pw_gid)
        command = [str(binary / "pg_receivewal"), "-D", str(self.folder), "--synchronous", "--no-loop"]
        conninfo = f"host=127.0.0.1 port={self._server.port} user=postgres application_name={self._name}"
        self._process = subprocess.Popen(
            as_postgres(*command, "-d", conninfo), stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/"
        )
        self._wait_for([(True,)])

    def stop(self) -> None:
        """End it, and wait until the server knows."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(START_S)
            if self._server.alive:
                self._wait_for([(False,)])

    def _wait_for(self, wanted: list[tuple[bool]]) -> None:
        statement = (
            "SELECT EXISTS (SELECT 1 FROM pg_stat_replication "
            f"WHERE state = 'streaming' AND sync_state IN ('sync', 'quorum') AND application_name = '{self._name}')"
        )
        deadline = time.monotonic() + START_S
        while self._server.sql(statement) != wanted:
            assert time.monotonic() < deadline, "the witness did not come, or go"
            time.sleep(0.02)
