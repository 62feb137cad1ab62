"""A learner is killed or runs out of disk while its thread writes a checkpoint: real processes, threads, disks."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gspo_services.learner.checkpoints.format import CheckpointError, load_checkpoint
from gspo_services.learner.checkpoints.saver import CheckpointSaver, Threads
from tests.support.learner.checkpoints import find_latest
from tests.support.learner.saving import save_checkpoint
from tests.support.learner.standing_writer import FILE_BYTES, NUM_FILES, STANDS, rows_engine, state
from tests.support.processes.run_process import REPOSITORY
from tests.support.processes.small_disk import small_disk

PATIENCE_S = 60.0
MIB = 2**20


@pytest.mark.faults
@pytest.mark.parametrize("num_files", [0, NUM_FILES - 2])
def test_a_learner_killed_while_its_thread_writes_leaves_only_the_last_checkpoint(num_files: int, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    command = [sys.executable, "-m", "tests.support.learner.standing_writer", str(root), str(num_files)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as learner:
        assert learner.stdout is not None
        # DeepSpeed logs to stdout, too.
        assert any(line.strip() == STANDS for line in learner.stdout)
        learner.send_signal(signal.SIGKILL)
        assert learner.wait(PATIENCE_S) == -signal.SIGKILL
    (partial,) = root.glob(".partial-*")
    assert len(list(partial.rglob("rows-*"))) == num_files + 1
    saved, again = find_latest(root), rows_engine(seed=1)
    assert saved is not None
    assert load_checkpoint(again, saved) == state(1)
    assert again.weights_digest() == rows_engine().weights_digest()
    # The next learner saves another version, and the partial checkpoint is gone.
    saver = CheckpointSaver(again, root, keep=2, background=Threads())
    saver.begin(state(3))
    published = saver.advance(wait_s=PATIENCE_S)
    assert published == find_latest(root)
    assert {path.name for path in root.iterdir()} == {"latest", saved.name, published.name if published else ""}


@pytest.mark.parametrize("room", [0, 4 * 4096, 3 * FILE_BYTES])
def test_a_thread_that_finds_no_room_gives_an_error_that_says_so_and_leaves_the_room_to_the_next(
    room: int, tmp_path: Path
) -> None:
    engine = rows_engine()
    with small_disk(tmp_path / "checkpoints", 4 * MIB) as disk:
        saved = save_checkpoint(engine, disk.path, state(1), keep=2)
        digest = engine.weights_digest()
        engine.table = (engine.table.detach() + 1).requires_grad_()
        saver = CheckpointSaver(engine, disk.path, keep=2, background=Threads())
        disk.fill(room)
        with pytest.raises(CheckpointError, match=r"cannot be written: .*make room"):  # noqa: PT012 - either may find out
            saver.begin(state(2))
            saver.advance(wait_s=PATIENCE_S)
        assert saver.pending is None
        assert find_latest(disk.path) == saved
        assert [path.name for path in disk.path.iterdir() if path.name.startswith(".")] == []
        fresh = rows_engine(seed=1)
        assert load_checkpoint(fresh, saved) == state(1)
        assert fresh.weights_digest() == digest
        disk.empty()
        saver.begin(state(2))
        assert saver.advance(wait_s=PATIENCE_S) == find_latest(disk.path) != saved
