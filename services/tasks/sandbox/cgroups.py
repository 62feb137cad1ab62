"""Cgroups that count all memory of programs, also what no process maps, where this machine lets us have some."""

import errno
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

PREFIX: Final = "gspo-sandbox-"
LEAF: Final = "gspo-processes"
"""Where the processes of a delegated cgroup go: only one without any can have parts with limits (cgroups(7))."""
FILES: Final = {
    "cgroup": ("cgroup.procs", "memory.limit_in_bytes", "memory.oom_control"),
    "cgroup2": ("cgroup.procs", "memory.max", "memory.events"),
}
"""By version: of processes, of the limit, and of the kernel's count of processes that it has ended."""
NO_SWAP: Final = {"cgroup": ("memory.swappiness", "0"), "cgroup2": ("memory.swap.max", "0")}
NO_CGROUP: Final = "no cgroup"
"""How ``MemoryCgroups.described`` begins where there is none."""
CGROUP_WAY_OUT: Final = (
    "it is counted every 50 ms, and a program may take more in between. Start gspo in a cgroup of its own, as root or with "
    "systemd-run --user --scope -p Delegate=yes gspo ..."
)
REMOVE_S: Final = 5.0
NEXT_S: Final = 0.01


class CgroupsRefused(Exception):
    """This machine gives no cgroup; the text says why."""


class MemoryCgroups:
    """A cgroup for each user of sandboxes; ``described`` says where, or why there are none."""

    def __init__(self, folder: Path | None, kind: str, described: str) -> None:
        self._folder = folder
        self._kind = kind
        self._files: dict[int, list[int]] = {}
        self.described = described

    def folder(self, user: int) -> Path:
        """Where the cgroup of ``user`` is. There must be cgroups."""
        assert self._folder is not None, self.described
        return self._folder / str(user)

    def files(self, user: int) -> list[int]:
        """Open files of the cgroup of ``user``: of processes, limit and events; none where there are no cgroups.

        Raises: OSError.
        """
        if self._folder is None:
            return []
        if user not in self._files:
            part = self.folder(user)
            part.mkdir()
            name, value = NO_SWAP[self._kind]
            with suppress(FileNotFoundError):  # a kernel without swap
                (part / name).write_text(value)
            ways = (os.O_WRONLY, os.O_WRONLY, os.O_RDONLY)
            self._files[user] = [os.open(part / name, way) for name, way in zip(FILES[self._kind], ways, strict=True)]
        return self._files[user]

    def close(self) -> None:
        """Remove what was made; its processes have been ended."""
        for files in self._files.values():
            for fd in files:
                os.close(fd)
        self._files.clear()
        if self._folder is not None:
            _remove(self._folder, REMOVE_S)


@contextmanager
def memory_cgroups(root: Path = Path("/proc/self"), controller: str = "memory") -> Iterator[MemoryCgroups]:
    """Cgroups below this process's own, until the end of the block. ``root``: where ``cgroup`` and ``mountinfo`` are."""
    try:
        folder, kind = _own(root, controller)
        made, lock = _made(folder, kind, controller)
    except CgroupsRefused as refused:
        yield MemoryCgroups(None, "", f"{NO_CGROUP} ({refused})")
        return
    cgroups = MemoryCgroups(made, kind, f"{'cgroup v2' if kind == 'cgroup2' else 'cgroup v1'} {folder}")
    try:
        yield cgroups
    finally:
        cgroups.close()
        os.close(lock)


def _own(root: Path, controller: str) -> tuple[Path, str]:
    """The folder of this process's cgroup and its kind. Raises: CgroupsRefused."""
    ways = {}
    for line in (root / "cgroup").read_text().splitlines():
        number, names, way = line.split(":", 2)
        if controller in names.split(","):
            ways["cgroup"] = way
        elif number == "0":
            ways["cgroup2"] = way
    for line in (root / "mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        place, (kind, _, options) = before.split()[3:5], after.split()[:3]
        if kind not in ways or (kind == "cgroup" and controller not in options.split(",")):
            continue
        way = ways[kind]
        if not Path(way).is_relative_to(place[0]):
            continue
        folder = Path(place[1]) / Path(way).relative_to(place[0])
        if folder.name == LEAF:
            folder = folder.parent
        if kind == "cgroup" or controller in _words(folder / "cgroup.controllers"):
            return folder, kind
    raise CgroupsRefused(f"none that counts {controller} is mounted here")


def _made(folder: Path, kind: str, controller: str) -> tuple[Path, int]:
    """A new folder below ``folder``, whose parts may have limits, and the lock that says it is in use.

    Raises: CgroupsRefused.
    """
    made = folder / f"{PREFIX}{secrets.token_hex(6)}"
    try:
        if kind == "cgroup2" and controller not in _words(folder / "cgroup.subtree_control"):
            _divide(folder, controller)
        made.mkdir()
        lock = os.open(made, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if kind == "cgroup2":
            (made / "cgroup.subtree_control").write_text(f"+{controller}")
    except OSError as error:
        with suppress(OSError):
            made.rmdir()
        raise CgroupsRefused(f"{folder} cannot have parts: {error.strerror}") from error
    _sweep(folder)
    return made, lock


def _divide(folder: Path, controller: str) -> None:
    """Let parts of ``folder`` have limits. Raises: OSError; CgroupsRefused."""
    try:
        (folder / "cgroup.subtree_control").write_text(f"+{controller}")
        return
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
    if not _is_delegated(folder):
        raise CgroupsRefused(f"{folder} has processes and is not delegated")
    leaf = folder / LEAF
    leaf.mkdir(exist_ok=True)
    for process in _words(folder / "cgroup.procs"):
        with suppress(ProcessLookupError):
            (leaf / "cgroup.procs").write_text(process)
    (folder / "cgroup.subtree_control").write_text(f"+{controller}")


def _is_delegated(folder: Path) -> bool:
    """Whether its processes are ours to move: another user's manager has given it to us, or marked it (systemd.exec(5))."""
    if os.geteuid() != 0:
        return folder.stat().st_uid == os.geteuid()
    for name in ("trusted.delegate", "user.delegate"):
        with suppress(OSError):
            if os.getxattr(folder, name) == b"1":
                return True
    return False


def _sweep(folder: Path) -> None:
    """Remove what processes that were killed have left."""
    for left in folder.glob(PREFIX + "*"):
        try:
            lock = os.open(left, os.O_RDONLY)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(left, 0)
        except OSError:
            continue  # somebody has it, or what was in it has not ended yet
        finally:
            os.close(lock)


def _remove(folder: Path, most_s: float) -> None:
    """Remove a folder and its parts, when the last processes in them are gone."""
    until = time.monotonic() + most_s
    for place in (*folder.glob("*/"), folder):
        while True:
            try:
                place.rmdir()
            except FileNotFoundError:
                pass
            except OSError:
                if time.monotonic() < until:
                    time.sleep(NEXT_S)
                    continue
            break


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
