"""Reads a run's checkpoints slowly during training, to find damage before one of them is needed.

It only reports. A damaged checkpoint is set aside when a learner would resume from it (``resuming``).
"""

import errno
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import structlog
import xxhash

from gspo_services.learner.checkpoints.digests import FileDigest
from gspo_services.learner.checkpoints.format import (
    CheckpointError,
    DamagedCheckpoint,
    checkpoints_newest_first,
    read_metadata,
)
from gspo_services.shared.runtime.foreign import ForeignTree

log = structlog.get_logger()

PIECE_BYTES: Final = 4 * 2**20
REST: Final = 19.0
"""Seconds of rest for each second of reading: a twentieth of one core and of the disk at most."""
LEAST_REST_S: Final = 0.05
PASS_EVERY_S: Final = 3600.0
WAY_OUT: Final = "if this one is needed, an older checkpoint is used; see `gspo backup`, and check the disk"


def damage_in(root: Path) -> Iterator[str]:
    """Read every checkpoint below ``root`` once, a piece at a time; yields after each piece: damage, or nothing.

    A checkpoint that is removed meanwhile, or is of another release, is left out.
    """
    for path in checkpoints_newest_first(root):
        try:
            files = read_metadata(path)["files"]
        except DamagedCheckpoint as error:
            yield str(error) if path.is_dir() else ""
            continue
        except CheckpointError:
            continue
        for name, noted in files.items():
            yield from _damage_of(path, name, FileDigest(**noted))


def _damage_of(path: Path, name: str, noted: FileDigest) -> Iterator[str]:
    found, num_bytes = xxhash.xxh3_128(), 0
    try:
        with ForeignTree(path).open(name) as file:
            while piece := file.read(PIECE_BYTES):
                found.update(piece)
                num_bytes += len(piece)
                yield ""
    except (OSError, ValueError) as error:
        passes = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.EINTR)
        if path.is_dir() and not passes:
            yield f"{path / name} cannot be read: {error}"
        return
    if (num_bytes, found.hexdigest()) != (noted.num_bytes, noted.digest):
        yield f"{path / name} has {num_bytes} bytes with digest {found.hexdigest()}, not what was written"


class CheckpointScrub:
    """One thread; use as a context manager. ``report`` gets the number of damaged files of a whole pass, from that thread.

    produces:     log lines; ``report``
    waits for:    its own pauses
    unblocked by: time; the end of the block
    """

    def __init__(
        self, root: Path, report: Callable[[int], None], *, rest: float = REST, every_s: float = PASS_EVERY_S
    ) -> None:
        self._root, self._report, self._rest, self._every_s = root, report, rest, every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="checkpoint-scrub", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            self._pass()

    def _pass(self) -> None:
        damaged, began = 0, time.monotonic()
        for text in damage_in(self._root):
            if text:
                damaged += 1
                log.error("checkpoint_damage_found", damage=text, way_out=WAY_OUT)
            if self._stop.wait(max(LEAST_REST_S, self._rest * (time.monotonic() - began))):
                return
            began = time.monotonic()
        self._report(damaged)
