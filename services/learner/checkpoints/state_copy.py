"""A copy of what an engine's ``save_state`` writes, so that another thread can write it while training continues."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gspo.files import flush_file
from gspo_services.learner.checkpoints.canary import write_canary
from gspo_services.learner.checkpoints.state_files import TensorFile, write_steps


@dataclass(frozen=True, kw_only=True)
class EngineCopy:
    """One rank's part: 12 bytes for each parameter that it copied."""

    rank: int
    files: Sequence[TensorFile]
    num_steps: int
    canary: Sequence[float]
    digest: str
    """The engine's ``weights_digest`` at that moment."""
    written: Sequence[Path] = ()
    """Files of the directory that were written at once, because there was no room for their copies."""
    failure: OSError | None = None
    """Why one of those could not be written."""

    def write(self, directory: Path) -> Sequence[Path]:
        """Write into ``directory``, make it, and flush to disk. Returns the files. Raises: OSError."""
        if self.failure is not None:
            raise self.failure
        directory.mkdir(exist_ok=True)
        written = [*self.written, *(file.write(directory) for file in self.files)]
        if self.rank == 0:
            written += [write_steps(directory, self.num_steps), write_canary(directory, self.canary)]
        for path in written:
            flush_file(path)
        return written

    def weights_digest(self) -> str:
        """Return the engine's ``weights_digest`` at that moment; empty on all ranks but the first."""
        return self.digest if self.rank == 0 else ""


def state_digest(tensors: Iterable[tuple[str, str, tuple[int, ...], str]]) -> bytes:
    """Digest of (name, type, shape, digest) of all tensors, in any order."""
    lines = sorted(f"{name}\0{dtype}\0{shape}\0{digest}\n" for name, dtype, shape, digest in tensors)
    return hashlib.blake2b("".join(lines).encode(), digest_size=32).digest()
