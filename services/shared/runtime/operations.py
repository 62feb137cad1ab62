"""Who is doing what with a run or a folder: one file for each operation, held as long as its process lives.

    RUN/.operation-backup-5f0c...       operations on a run: as many as there are, unless one has to be alone
    PARENT/.operation-NAME              the one that writes to PARENT/NAME
    BACKUPS/.operation-backup           the one that writes to BACKUPS, which may be the root of a volume

Its owner has the file locked, and the kernel takes the lock back when it dies, in whatever container. Where hosts do not see
one another's locks, a file of another kernel is its owner's as long as its time of change changes: no clocks are compared.
"""

import errno
import fcntl
import getpass
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Self

import msgspec

from gspo_services.shared.runtime.errors import OccupiedError

BEAT_S: Final = 3.0
SILENT_S: Final = 15.0
"""Without a beat for this long, an owner on another host is dead."""
PREFIX: Final = ".operation-"
_TRIES: Final = 5
_TRY_S: Final = 0.05
_MOST_BYTES: Final = 4096
_READ_ONLY: Final = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT)
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


class OperationOwner(msgspec.Struct, frozen=True):
    """What is in the file."""

    operation: str
    user: str
    host: str
    boot: str
    """The kernel that it runs on, which its containers share."""
    pid: int
    """In its own container."""
    since: str
    alone: bool = False

    @classmethod
    def here(cls, operation: str, *, alone: bool = False) -> Self:
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # a container's user without a name
            user = str(os.getuid())
        since = f"{datetime.now(tz=UTC):%Y-%m-%d %H:%M:%S} UTC"
        return cls(operation, user, socket.gethostname(), _boot(), os.getpid(), since, alone)

    def __str__(self) -> str:
        return f"`gspo {self.operation}` of {self.user} on {self.host} (process {self.pid}) since {self.since}"


@contextmanager
def only_operation(target: Path, operation: str, way_out: str, *, inside: bool = False) -> Iterator[None]:
    """Be the one that writes to ``target``, which may not be there yet; its parent is made. ``inside``: the file is in it.

    Raises: OccupiedError that names the other one and has ``way_out``; OSError.
    """
    target = Path(os.path.abspath(target))
    place = target if inside else target.parent
    place.mkdir(parents=True, exist_ok=True)
    lease = _taken(place / f"{PREFIX}{operation if inside else target.name}", OperationOwner.here(operation))
    if not isinstance(lease, _Lease):
        raise OccupiedError(f"{_named(lease)} is writing to {target}: {way_out}")
    with lease:
        yield


@contextmanager
def operation_on(run: Path, operation: str, *, alone: bool = False) -> Iterator[str]:
    """Say that ``operation`` is under way on ``run``, beside others unless one of them has to be ``alone``.

    Yields a name that no other one has; empty where nobody can write, as on a snapshot. Raises: OccupiedError that names
    the other one; OSError.
    """
    name = f"{operation.replace(' ', '-')}-{uuid.uuid4().hex[:12]}"
    path = run / f"{PREFIX}{name}"
    try:
        lease = _taken(path, OperationOwner.here(operation, alone=alone))
    except OSError as error:
        if error.errno not in _READ_ONLY:
            raise
        yield ""
        return
    if not isinstance(lease, _Lease):
        raise OccupiedError(f"{path} cannot be locked: {_named(lease)} has it")
    with lease:
        # Each shows its own file first: of two that exclude each other, one sees the other.
        for other in run.glob(f"{PREFIX}*"):
            owner = None if other == path else _alive(other)
            if owner is not None and (alone or owner.alone):
                raise OccupiedError(f"{_named(owner)} is at work on {run}: wait for it")
        yield name


def is_under_way(run: Path, name: str) -> bool:
    """Whether the operation of this name is alive. The file of a dead one is removed."""
    return _alive(run / f"{PREFIX}{name}") is not None


class _Lease:
    """A locked file with its owner, and the thread that beats."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="operation", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self.release()

    def release(self) -> None:
        """Remove the file, then the lock: nobody locks a file that is still there for others."""
        with suppress(OSError):
            self._path.unlink()
        os.close(self._descriptor)

    def _beat(self) -> None:
        while not self._end.wait(BEAT_S):
            with suppress(OSError):  # What it works on is away, too, and says so.
                os.utime(self._descriptor)


def _taken(path: Path, owner: OperationOwner) -> "_Lease | OperationOwner | None":
    """The lease, or who has it; None: somebody who has not said so yet. Raises: OSError."""
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(_TRY_S)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            former = _locked(path, descriptor)
            if former is not None and _beats(path, former):
                return former
            try:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, msgspec.json.encode(owner), 0)
            except OSError:
                with suppress(OSError):
                    path.unlink()  # A full disk has room for an empty file, which would stay.
                raise
            lease, descriptor = _Lease(path, descriptor), -1
            return lease
        except FileNotFoundError:
            holder = None
        except BlockingIOError:
            holder = _read(descriptor)
        finally:
            if descriptor >= 0:
                os.close(descriptor)
    return holder


def _locked(path: Path, descriptor: int) -> OperationOwner | None:
    """Lock a file. Returns who had it before. Raises: BlockingIOError while another has it; FileNotFoundError when it was
    removed, or made anew, meanwhile."""
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if not os.path.samestat(os.fstat(descriptor), path.stat()):
        raise FileNotFoundError(path)
    return _read(descriptor)


def _alive(path: Path) -> OperationOwner | None:
    """Who has a file; None: nobody, and it is removed."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        former = _locked(path, descriptor)
        if former is not None and _beats(path, former):
            return former
        path.unlink()
    except FileNotFoundError:
        return None
    except BlockingIOError:
        # It has not said yet who it is.
        return _read(descriptor) or OperationOwner.here("command")
    finally:
        os.close(descriptor)
    return None


def _beats(path: Path, owner: OperationOwner) -> bool:
    """Whether an owner whose lock is not seen here is alive: of this kernel, never; elsewhere, if it beats."""
    if owner.boot == _boot():
        return False
    first, until = path.stat().st_mtime_ns, time.monotonic() + SILENT_S
    while time.monotonic() < until:
        time.sleep(min(BEAT_S, SILENT_S) / 4)
        with path.open("rb") as file:  # A network file system asks its server when a file is opened.
            if os.fstat(file.fileno()).st_mtime_ns != first:
                return True
    return False


def _read(descriptor: int) -> OperationOwner | None:
    try:
        return msgspec.json.decode(os.pread(descriptor, _MOST_BYTES, 0), type=OperationOwner)
    except (ValueError, RecursionError):
        return None


def _named(owner: OperationOwner | None) -> str:
    return "another process" if owner is None else f"another {owner}"


def _boot() -> str:
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()
