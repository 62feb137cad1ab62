"""Takes tasks that are added to a run while it goes on, from files in its directory.

    RUN/data/incoming/FILE             what is to be added, to the first source
    RUN/data/incoming/SOURCE/FILE      likewise, to another one
    RUN/data/added/000001-FILE         what was added; the ledger names it with its digest
    RUN/data/refused/FILE              what could not be; FILE.reason.txt says why

A file is taken once it stands still and is whole. It is in ``added/`` on the disk before the ledger names it, and leaves
``incoming/`` after that, so that a kill at any moment loses no task and adds none twice.
"""

import asyncio
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from gspo.tasks.environments import Task
from gspo_services.broker.ledger import AddedTasks
from gspo_services.broker.rows import ADDED_DIRECTORY, AdditionRow
from gspo_services.broker.store import file_digest
from gspo_services.shared.runtime.errors import ConfigurationError, is_for_want_of_room
from gspo_services.tasks.environments import MixedTasks

log = structlog.get_logger()

INCOMING: Final = "data/incoming"
REFUSED: Final = "data/refused"
LOOK_S: Final = 1.0


@dataclass(frozen=True)
class _Look:
    """A file as it was seen: one that stands still is the same at the next look."""

    path: Path
    num_bytes: int
    mtime_ns: int


class Refresh:
    """Watches the folder of incoming files. One file at a time is on its way into the ledger."""

    def __init__(
        self,
        directory: Path,
        tasks: MixedTasks,
        additions: Sequence[AdditionRow],
        require: Callable[[Task], object] | None = None,
    ) -> None:
        """``directory``: the run's. ``tasks`` hold those of ``additions`` already. ``require`` raises ValueError for a task
        that the run cannot have."""
        self._directory = directory
        self._tasks = tasks
        self._require = require
        self._next_number = len(additions) + 1
        self._digests = {row.digest for row in additions}
        self._seen: dict[Path, _Look] = {}
        self._unfinished: set[Path] = set()
        self._without_room: set[Path] = set()
        self._ready: tuple[Path, AddedTasks] | None = None
        self._durable = asyncio.Event()

    async def run(self) -> None:
        """Look for files until cancelled.

        produces:     one addition at a time, which ``take`` gives away
        waits for:    a file that stands still; the ledger
        unblocked by: the next look; ``is_durable``
        """
        while True:
            path = await asyncio.to_thread(self._next_file)
            if path is not None and await self._prepare(path):
                await self._durable.wait()
                await asyncio.to_thread(path.unlink, missing_ok=True)
                self._durable.clear()
            else:
                await asyncio.sleep(LOOK_S)

    def take(self) -> AddedTasks | None:
        """What the ledger is to add now; each once."""
        if self._ready is None:
            return None
        _, added = self._ready
        self._ready = None
        return added

    def is_durable(self) -> None:
        """The ledger has what was taken last."""
        self._durable.set()

    async def _prepare(self, path: Path) -> bool:
        """Put the file's tasks behind the others. False: it is refused, was added before, or waits for room on the disk."""
        try:
            added = await asyncio.to_thread(self._added_or_refused, path)
        except OSError as error:
            if not is_for_want_of_room(error):
                raise
            if path not in self._without_room:
                self._without_room.add(path)
                log.warning("data_waits_for_room", file=str(path), reason=str(error), way_out="make room: it is tried again")
            return False
        self._without_room.discard(path)
        if added is not None:
            self._ready = (path, added)
        return added is not None

    def _next_file(self) -> Path | None:
        """The first file that stands still and is whole."""
        found = {}
        for path in sorted((self._directory / INCOMING).glob("**/*")):
            if path.name.startswith(".") or not path.is_file():
                continue
            status = path.stat()
            look = found[path] = _Look(path, status.st_size, status.st_mtime_ns)
            if self._seen.get(path) != look:
                continue
            if _is_whole(path):
                return path
            if path not in self._unfinished:
                self._unfinished.add(path)
                log.warning("data_file_unfinished", file=str(path), way_out="its last line has no end: it is waited for")
        self._seen = found
        return None

    def _added_or_refused(self, path: Path) -> AddedTasks | None:
        """Raises: OSError for a full disk, which is no fault of the file."""
        try:
            return self._add(path)
        except (ValueError, OSError) as error:
            if is_for_want_of_room(error):
                raise
            log.error("data_refused", file=str(path), reason=str(error))
            self._refuse(path, str(error))
            return None

    def _add(self, path: Path) -> AddedTasks | None:
        source = self._source_of(path)
        if path.is_symlink():
            raise ValueError(f"{path} is a link: links are not followed here; copy the file, or use `gspo data add`")
        digest = file_digest(path)
        if digest in self._digests:  # A broker was killed before it could remove it.
            path.unlink()
            return None
        name = f"{self._next_number:06}-{path.name}"
        copy = self._directory / ADDED_DIRECTORY / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        partial = copy.with_name(f".{name}")
        try:
            shutil.copyfile(path, partial)
            if file_digest(partial) != digest:
                raise ValueError(
                    f"{path} changed while it was read: write it elsewhere and rename it, or use `gspo data add`"
                )
            _sync(partial)
            partial.rename(copy)
            _sync(copy.parent)
            first_task = self._tasks.num_tasks
            num_tasks = self._tasks.add(copy, self._require)
        except (ValueError, OSError) as error:
            for left in (partial, copy):
                left.unlink(missing_ok=True)
            if isinstance(error, ValueError):
                raise ValueError(str(error).replace(str(copy), str(path))) from error
            raise
        self._next_number += 1
        self._digests.add(digest)
        return AddedTasks(source=source, name=name, digest=digest, first_task=first_task, num_tasks=num_tasks)

    def _source_of(self, path: Path) -> str:
        """The source that the file is for. Raises: ValueError for one that there is not."""
        names = [part.name for part in self._tasks.parts]
        folder = path.relative_to(self._directory / INCOMING).parent.as_posix()
        if folder == ".":
            return names[0]
        if folder not in names:
            raise ValueError(f'there is no source "{folder}": the run has {", ".join(names)}')
        return folder

    def _refuse(self, path: Path, reason: str) -> None:
        folder = self._directory / REFUSED
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{path.name}.reason.txt").write_text(reason + "\n", encoding="utf-8")
        path.replace(folder / path.name)


def read_additions(directory: Path, tasks: MixedTasks, additions: Sequence[AdditionRow]) -> None:
    """Put what was added to the run in ``directory`` behind its first tasks, as it was.

    Raises: ConfigurationError that names a file that is missing or was changed, and the way out.
    """
    for row in additions:
        path = directory / ADDED_DIRECTORY / row.name
        way_out = f"put it back from a backup; the ledger says that it has {row.num_tasks} tasks and digest {row.digest}"
        try:
            if file_digest(path) != row.digest:
                raise ConfigurationError(f"{path} was changed since its tasks were added: {way_out}")
            first_task, num_tasks = tasks.num_tasks, tasks.add(path)
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{path} cannot be read: {error}; {way_out}") from error
        if (first_task, num_tasks) != (row.first_task, row.num_tasks):
            raise ConfigurationError(
                f"{path} has {num_tasks} usable tasks from {first_task} on, the ledger has {row.num_tasks} from "
                f"{row.first_task} on: the training set is another than it was; {way_out}"
            )


def _is_whole(path: Path) -> bool:
    """Whether the last line of a .jsonl file has its end. Of a Parquet file that is seen when it is read."""
    if path.suffix != ".jsonl":
        return True
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
