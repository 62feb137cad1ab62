"""A learner whose state has many files, like a real one.

``python -m tests.support.learner.standing_writer DIRECTORY FILES`` saves version 1 and begins to save version 2 during
training.
The writing thread stops after this many files and half of the next; then the process reports it, and waits to be killed.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from gspo_services.learner.checkpoints.format import CheckpointState
from gspo_services.learner.checkpoints.saver import CheckpointSaver, Threads
from gspo_services.learner.checkpoints.state_files import TensorFile
from tests.support.engines.bigram_engine import BigramEngine
from tests.support.learner.saving import save_checkpoint

NUM_FILES = 8
VOCAB_SIZE = 256
FILE_BYTES = VOCAB_SIZE * VOCAB_SIZE * 4 // NUM_FILES
STANDS = "stands still"


def state(version: int) -> CheckpointState:
    return CheckpointState(policy_version=version, batch_position=version, mismatch={})


def rows_engine(*, seed: int = 0) -> BigramEngine:
    """256 KiB in NUM_FILES files."""
    return BigramEngine(VOCAB_SIZE, seed=seed, num_files=NUM_FILES)


class HalfFile(TensorFile):
    """A file that is written up to its middle, and never further."""

    def write(self, directory: Path) -> Path:
        path = super().write(directory)
        path.write_bytes(path.read_bytes()[: FILE_BYTES // 2])
        print(STANDS, flush=True)
        threading.Event().wait()
        return path


def main(directory: str, num_files: str) -> None:
    engine, root, sound = rows_engine(), Path(directory), int(num_files)
    engine.copied = lambda files: [*files[:sound], *(HalfFile(**vars(file)) for file in files[sound:])]
    save_checkpoint(engine, root, state(1), keep=2)
    engine.table = (engine.table.detach() + 1).requires_grad_()
    saver = CheckpointSaver(engine, root, keep=2, background=Threads())
    saver.begin(state(2))
    # Training continues.
    while saver.advance(wait_s=1.0) is None:
        engine.table = (engine.table.detach() + 1).requires_grad_()


if __name__ == "__main__":
    main(*sys.argv[1:])
