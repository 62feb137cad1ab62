"""A learner engine with many state files, like a real one, written by the real copy of a state.

``python -m tests.support.engines.rows_engine DIRECTORY FILES`` saves version 1 and begins to save version 2 during training.
The writing thread stops after this many files and half of the next; then the process reports it, and waits to be killed.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from gspo_services.learner.checkpoints.digest_stream import streamed_digest
from gspo_services.learner.checkpoints.format import CheckpointState
from gspo_services.learner.checkpoints.saver import CheckpointSaver, Threads
from gspo_services.learner.checkpoints.state_copy import EngineCopy
from gspo_services.learner.checkpoints.state_files import TensorDirectory, TensorFile
from tests.support.engines.bigram_engine import BigramEngine
from tests.support.learner.saving import save_checkpoint

NUM_FILES = 8
VOCAB_SIZE = 256
FILE_BYTES = VOCAB_SIZE * VOCAB_SIZE * 4 // NUM_FILES
STANDS = "stands still"


def state(version: int) -> CheckpointState:
    return CheckpointState(policy_version=version, batch_position=version, mismatch={})


class RowsEngine(BigramEngine):
    """256 KiB in NUM_FILES files."""

    def __init__(self, *, seed: int = 0, stands_behind: int = NUM_FILES) -> None:
        super().__init__(VOCAB_SIZE, seed=seed)
        self.stands_behind = stands_behind

    def _files(self) -> list[TensorFile]:
        rows = self.table.detach().clone().chunk(NUM_FILES)
        return [
            TensorFile(stem=f"rows-{at}", tensors={"table": part}, first_row=at * len(part)) for at, part in enumerate(rows)
        ]

    def save_state(self, directory: Path) -> list[Path]:
        return list(self._copy(self._files()).write(directory))

    def copy_state(self, directory: Path) -> EngineCopy:
        files = self._files()
        return self._copy([*files[: self.stands_behind], *map(HalfFile, files[self.stands_behind :])])

    def _copy(self, files: list[TensorFile]) -> EngineCopy:
        digest = streamed_digest([("table", self.table)]).hex()
        return EngineCopy(rank=0, files=files, num_steps=1, canary=[0.0], digest=digest)

    def weights_digest(self) -> str:
        return self._copy([]).weights_digest()

    def load_state(self, directory: Path) -> None:
        shape = (VOCAB_SIZE, VOCAB_SIZE)
        self.table = TensorDirectory(directory).read("table", 0, VOCAB_SIZE, shape).requires_grad_()


@dataclass(frozen=True)
class HalfFile:
    """A file that is written up to its middle, and never further."""

    file: TensorFile

    def write(self, directory: Path) -> Path:
        path = self.file.write(directory)
        path.write_bytes(path.read_bytes()[: FILE_BYTES // 2])
        print(STANDS, flush=True)
        threading.Event().wait()
        return path


def main(directory: str, num_files: str) -> None:
    engine, root = RowsEngine(stands_behind=int(num_files)), Path(directory)
    save_checkpoint(engine, root, state(1), keep=2)
    engine.table = (engine.table.detach() + 1).requires_grad_()
    saver = CheckpointSaver(engine, root, keep=2, background=Threads())
    saver.begin(state(2))
    # Training continues.
    while saver.advance(wait_s=1.0) is None:
        engine.table = (engine.table.detach() + 1).requires_grad_()


if __name__ == "__main__":
    main(*sys.argv[1:])
