"""Checkpoints that are written while training continues."""

import random
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gspo_protocol.messages import LedgerCommit
from gspo_services.learner.checkpoints.format import (
    CheckpointError,
    CheckpointState,
    StateCopy,
    load_checkpoint,
)
from gspo_services.learner.checkpoints.saver import CheckpointSaver, Threads
from gspo_services.learner.checkpoints.versions import Versions, known_commit
from tests.support.engines.bigram_engine import BigramEngine
from tests.support.learner.checkpoints import find_latest
from tests.support.learner.held_background import HeldBackground
from tests.support.learner.saving import save_checkpoint
from tests.support.wire.zmq_ends import a_welcome


def state(version: int) -> CheckpointState:
    return CheckpointState(policy_version=version, batch_position=version, mismatch={"variance": 0.25})


def held(engine: BigramEngine, root: Path, failure: Exception | None = None) -> CheckpointSaver:
    return CheckpointSaver(engine, root, keep=2, background=HeldBackground(until_waited_for=True, failure=failure))


def test_a_checkpoint_holds_the_state_at_its_beginning_although_training_continues(tmp_path: Path) -> None:
    engine = BigramEngine(seed=1)
    saver = held(engine, tmp_path / "beside")
    saver.begin(state(7))
    expected, table = random.getstate(), engine.table.detach().clone()
    synchronous = save_checkpoint(engine, tmp_path / "at-once", state(7))
    random.random()
    with torch.no_grad():
        engine.table += 1
    assert saver.pending == state(7)
    assert saver.advance() is None
    assert find_latest(tmp_path / "beside") is None
    saved = saver.advance(wait_s=1.0)
    assert saved is not None
    assert saver.pending is None
    fresh = BigramEngine(seed=2)
    assert load_checkpoint(fresh, saved) == state(7)
    assert torch.equal(fresh.table, table)
    assert random.getstate() == expected
    files = [path.relative_to(saved) for path in saved.rglob("*") if path.is_file()]
    assert len(files) == 5
    for file in files:
        assert (saved / file).read_bytes() == (synchronous / file).read_bytes(), file


def test_a_checkpoint_is_not_published_before_the_caller_allows_it(tmp_path: Path) -> None:
    saver = held(BigramEngine(), tmp_path)
    saver.begin(state(1))
    assert saver.advance(may_publish=False, wait_s=1.0) is None
    assert find_latest(tmp_path) is None
    assert saver.advance() == find_latest(tmp_path)


def test_an_abandoned_checkpoint_leaves_nothing(tmp_path: Path) -> None:
    saver = held(BigramEngine(), tmp_path)
    saver.begin(state(1))
    saver.discard()
    assert saver.pending is None
    assert list(tmp_path.iterdir()) == []


def test_a_thread_that_cannot_write_is_reported_at_the_next_look_and_the_last_checkpoint_stays(tmp_path: Path) -> None:
    previous = save_checkpoint(BigramEngine(), tmp_path, state(1))
    saver = held(BigramEngine(), tmp_path, OSError("No space left on device"))
    saver.begin(state(2))
    assert saver.advance() is None
    with pytest.raises(CheckpointError, match="batch-0000000002 cannot be written: No space left on device"):
        saver.advance(wait_s=1.0)
    assert saver.pending is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", previous.name]


class OneOfTwo(BigramEngine):
    """Rank 1; rank 0's flags are added to its own."""

    rank = 1
    world_size = 2
    other_waits = 0.0
    other_failed = 0.0

    def sum_over_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor + torch.tensor([self.other_waits, self.other_failed]) if tensor.shape == (2,) else tensor


def begun_on_one_of_two(root: Path) -> tuple[OneOfTwo, CheckpointSaver]:
    engine = OneOfTwo()
    saver = held(engine, root)
    (root / ".partial-version-0000000002-batch-0000000002").mkdir(parents=True)  # Rank 0 would have made it.
    saver.begin(state(2))
    return engine, saver


def test_a_rank_that_has_written_waits_for_the_others(tmp_path: Path) -> None:
    engine, saver = begun_on_one_of_two(tmp_path)
    engine.other_waits = 1.0
    assert saver.advance(wait_s=1.0) is None
    engine.other_waits = 0.0
    assert saver.advance() == tmp_path / "version-0000000002-batch-0000000002"


def test_a_rank_gives_up_with_another_one_that_cannot_write(tmp_path: Path) -> None:
    engine, saver = begun_on_one_of_two(tmp_path)
    engine.other_failed = 1.0
    with pytest.raises(CheckpointError, match="another rank could not write its part"):
        saver.advance()
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_is_not_there_before_the_note_of_the_ledger_that_holds_its_batches(tmp_path: Path) -> None:
    told = [LedgerCommit(run_id="test", number=5, digest="d")]
    versions = Versions(tmp_path, "first", lambda: told[0])
    versions.begin(a_welcome())
    background = HeldBackground(until_waited_for=True)
    saver = CheckpointSaver(BigramEngine(), tmp_path, keep=2, background=background, versions=versions)
    saver.begin(state(1))
    told[:] = [LedgerCommit(run_id="test", number=6, digest="d")]
    assert saver.advance(may_publish=False, wait_s=1.0) is None
    assert known_commit(tmp_path) == LedgerCommit(run_id="test", number=5, digest="d")
    assert saver.advance(wait_s=1.0) is not None
    assert known_commit(tmp_path) == told[0]


def test_an_older_learner_saves_nothing_once_another_one_has_begun(tmp_path: Path) -> None:
    versions = Versions(tmp_path, "first")
    versions.begin(a_welcome())
    background = HeldBackground(until_waited_for=True)
    saver = CheckpointSaver(BigramEngine(), tmp_path, keep=2, background=background, versions=versions)
    saver.begin(state(1))
    assert saver.advance(wait_s=1.0) is not None
    saver.begin(state(2))
    Versions(tmp_path, "second").begin(a_welcome())
    with pytest.raises(CheckpointError, match=r"another learner uses this run\.directory"):
        saver.advance(wait_s=1.0)
    with pytest.raises(CheckpointError, match=r"another learner uses this run\.directory"):
        CheckpointSaver(BigramEngine(), tmp_path, keep=2, background=None, versions=versions).begin(state(2))
    latest = find_latest(tmp_path)
    assert latest is not None
    assert latest.name == "version-0000000001-batch-0000000001"


def test_when_training_fails_the_thread_still_writes_and_is_waited_for(tmp_path: Path) -> None:
    go = threading.Event()

    class Slow(BigramEngine):
        def copy_state(self, directory: Path) -> StateCopy:
            copied = super().copy_state(directory)
            write = copied.write

            class Waiting:
                def write(self, directory: Path) -> list[Path]:
                    assert go.wait(20.0)
                    return write(directory)

                def weights_digest(self) -> str:
                    return copied.weights_digest()

            return Waiting()

    engine = Slow()
    saver = CheckpointSaver(engine, tmp_path, keep=1, background=Threads())
    saver.begin(state(1))
    assert saver.advance() is None
    go.set()
    saver.abandon()
    saved = saver.advance()
    assert saved is not None
    assert load_checkpoint(BigramEngine(), saved) == state(1)


def test_an_error_in_the_thread_is_raised_where_training_asks_for_its_result(tmp_path: Path) -> None:
    class Mistaken(BigramEngine):
        def copy_state(self, directory: Path) -> StateCopy:
            copied = super().copy_state(directory)
            return replace(copied, files=None)  # type: ignore[arg-type]

    saver = CheckpointSaver(Mistaken(), tmp_path, keep=1, background=Threads())
    saver.begin(state(1))
    saver.abandon()
    with pytest.raises((TypeError, ValueError, AttributeError)):
        saver.advance()
    assert find_latest(tmp_path) is None
