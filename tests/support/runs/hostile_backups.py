"""Backups that somebody made to harm whoever restores them, by a seed; and what must hold whatever was restored."""

import ctypes
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any, Final

from gspo_services.runs.backup.manifest import MANIFEST
from tests.fuzz.mutate import mutate_plain

SECRET: Final = b"what nobody may read or change: " * 32
_OPENED: Final = 0x1 | 0x20
"""IN_ACCESS | IN_OPEN of inotify."""
_NAMES: Final = (
    "../victim/evil", "../../victim/secret", "a/../../victim/evil", "checkpoints/../../victim/evil", "..", ".", "", "/",
    "./settings.json", "archive//x.parquet", "archive/../../../victim/evil", "x\0y", "checkpoints/evil",
    "checkpoints/latest/x", "checkpoints/version-x-batch-y/z",
    "ledger.sqlite3-journal", "ledger.sqlite3-wal", "ledger.sqlite3-shm", ".ssh/id",
    "\ud800", "n" * 300, "/".join("d" * 40), "data/added/" + "y" * 2000, "settings.json/x", "checkpoints", "backup.json",
    "archive/\x1b[2J.parquet", "data/added/a\nb", "..\\..\\victim\\evil",
)  # fmt: skip
Plain = dict[str, Any]


def make_hostile(good: Path, backup: Path, victim: Path, rng: Random, *, manifest: bytes = b"", least: int = 1) -> None:
    """Write a copy of the backup ``good`` with ``least`` to three changes. ``victim``: a directory that holds ``secret``.
    ``manifest``: in place of its own."""
    shutil.copytree(good, backup)
    (backup / MANIFEST).write_bytes(manifest or (good / MANIFEST).read_bytes())
    try:
        plain = json.loads(manifest or (good / MANIFEST).read_bytes())
    except (ValueError, RecursionError):
        return
    for _ in range(rng.choice((least, 1, 2, 3))):
        change = rng.choice(_CHANGES)
        try:
            change(backup, plain, victim, rng)
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            continue  # An earlier change has left nothing for this one.
    if isinstance(plain, dict) and not (backup / MANIFEST).is_symlink() and (backup / MANIFEST).is_file():
        try:
            (backup / MANIFEST).write_text(json.dumps(plain))
        except RecursionError:
            (backup / MANIFEST).write_text("[" * 100_000)


def _entry(content: bytes) -> Plain:
    return {"num_bytes": len(content), "sha256": sha256(content).hexdigest(), "mtime_ns": 1}


def _any_file(backup: Path, plain: Plain, rng: Random) -> str:
    """Raises: IndexError when an earlier change has left none that is regular and small."""
    plainly = [
        name
        for name in sorted(plain["files"])
        if (path := backup / name).is_file() and path.resolve() == path.absolute() and 0 < path.stat().st_size < 1 << 20
    ]
    return rng.choice(plainly)


def _name(backup: Path, plain: Plain, victim: Path, rng: Random) -> None:
    """A file under a bad name, which is there if it can be."""
    name = rng.choice((*_NAMES, str(victim / "secret"), str(victim / "evil")))
    content = rng.choice((b"", b"evil"))
    plain["files"][name] = _entry(content)
    if not name.startswith(("/", "..")) and "/../" not in name:
        (backup / name).parent.mkdir(parents=True, exist_ok=True)
        (backup / name).write_bytes(content)


def _linked_file(backup: Path, plain: Plain, victim: Path, rng: Random) -> None:
    name = rng.choice(sorted(plain["files"]))
    (backup / name).unlink()
    target = rng.choice((str(victim / "secret"), "/dev/zero", "nowhere", (backup / name).name, "../../victim/secret"))
    (backup / name).symlink_to(target)
    if rng.random() < 0.5:
        plain["files"][name] = _entry(SECRET)


def _added_link(backup: Path, plain: Plain, victim: Path, rng: Random) -> None:
    name = rng.choice(("data/added/000001-x.jsonl", "checkpoints/last-version", "teacher-scores/rank-7.sqlite", "secret"))
    (backup / name).parent.mkdir(parents=True, exist_ok=True)
    (backup / name).symlink_to(victim / "secret")
    plain["files"][name] = _entry(SECRET)


def _linked_folder(backup: Path, plain: Plain, victim: Path, rng: Random) -> None:
    """A folder that is a link to a whole copy of it elsewhere, or out of the backup."""
    folder = rng.choice([path for path in sorted(backup.rglob("*")) if path.is_dir() and not path.is_symlink()])
    if rng.random() < 0.5:
        shutil.rmtree(folder)
        folder.symlink_to(victim)
        plain["files"][f"{folder.relative_to(backup)}/secret"] = _entry(SECRET)
    else:
        aside = victim / f"aside-{rng.randrange(10**9)}"
        folder.rename(aside)
        folder.symlink_to(aside)


def _special(backup: Path, plain: Plain, victim: Path, rng: Random) -> None:
    """What is no regular file."""
    path = backup / rng.choice([MANIFEST, *sorted(plain["files"])])
    path.unlink()
    match rng.randrange(4):
        case 0:
            os.mkfifo(path)
        case 1:
            path.mkdir()
        case 2:
            path.symlink_to(victim / "secret")
        case _:
            with socket.socket(socket.AF_UNIX) as made:
                here = os.open(path.parent, os.O_RDONLY)
                try:  # The name of a socket must be short.
                    made.bind(f"/proc/self/fd/{here}/{path.name}")
                finally:
                    os.close(here)


def _size(backup: Path, plain: Plain, victim: Path, rng: Random) -> None:
    """Another size than was declared: a hole takes no room, and would be read for hours."""
    name = _any_file(backup, plain, rng)
    match rng.randrange(3):
        case 0:
            os.truncate(backup / name, 1 << 42)
        case 1:
            os.truncate(backup / name, 0)
        case _:
            plain["files"][name]["num_bytes"] = rng.choice((-1, 0, 1, 1 << 42, 2**53, 2**63, 0.5, "1"))
    if rng.random() < 0.2:
        os.truncate(backup / name, 1 << 41)
        plain["files"][name]["num_bytes"] = 1 << 41


def _bytes(backup: Path, plain: Plain, victim: Path, rng: Random) -> None:
    """Other bytes, with or without their digest."""
    name = _any_file(backup, plain, rng)
    content = bytearray((backup / name).read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    (backup / name).write_bytes(content)
    if rng.random() < 0.7:
        plain["files"][name] = _entry(bytes(content))


def _replaced(backup: Path, plain: Plain, victim: Path, rng: Random) -> None:
    """A whole file of nonsense, with its digest."""
    name = _any_file(backup, plain, rng)
    content = rng.choice((b"", b"{}", b"[]", b"null", b'{"run": []}', b"[" * 100_000, b"\0" * 100, b"SQLite format 3\0"))
    (backup / name).write_bytes(content)
    plain["files"][name] = _entry(content)


def _manifest(backup: Path, plain: Plain, victim: Path, rng: Random) -> None:
    other = mutate_plain(plain, rng)
    if isinstance(other, dict):
        plain.clear()
        plain.update(other)


_CHANGES: Final[tuple[Callable[[Path, Plain, Path, Random], None], ...]] = (
    _name, _name, _linked_file, _added_link, _linked_folder, _special, _size, _bytes, _replaced, _manifest
)  # fmt: skip


def declared_bytes(backup: Path) -> int:
    """What its manifest says, and the manifest itself."""
    path = backup / MANIFEST
    if path.is_symlink() or not path.is_file():
        return 0
    try:
        files = json.loads(path.read_bytes())["files"]
        sizes = [each["num_bytes"] for each in files.values()]
        return path.stat().st_size + sum(size for size in sizes if isinstance(size, int) and size > 0)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return path.stat().st_size


def bytes_read() -> int:
    """Bytes that this process has read from files so far."""
    with open("/proc/self/io", encoding="ascii") as file:
        return int(file.readline().split()[1])


def contents(directory: Path) -> dict[str, tuple[Any, ...]]:
    """Everything below a directory: kind, times, target of links, bytes of small files."""
    found = {}
    for path in sorted(directory.rglob("*")):
        status = path.lstat()
        held = os.readlink(path) if path.is_symlink() else ""
        if path.is_file() and not path.is_symlink() and status.st_size < 1 << 20:
            held = sha256(path.read_bytes()).hexdigest()
        found[str(path.relative_to(directory))] = (status.st_mode, status.st_size, status.st_mtime_ns, held)
    return found


@contextmanager
def opened_in(directory: Path) -> Iterator[Callable[[], bool]]:
    """Yield whether anything in ``directory`` was opened or read since, as the kernel tells it."""
    library = ctypes.CDLL(None, use_errno=True)
    watch = library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if watch < 0 or library.inotify_add_watch(watch, os.fsencode(directory), _OPENED) < 0:
            raise OSError(ctypes.get_errno(), "inotify")

        def was_opened() -> bool:
            try:
                events = os.read(watch, 1 << 16)
            except BlockingIOError:
                return False
            # Of the directory itself: somebody listed it.
            return any(name.strip(b"\0") for name in _names(events))

        yield was_opened
    finally:
        os.close(watch)


def _names(events: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(events):
        length = int.from_bytes(events[at + 12 : at + 16], "little")
        yield events[at + 16 : at + 16 + length]
        at += 16 + length
