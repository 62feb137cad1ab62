"""A damaged checkpoint is set aside, and the next older one is resumed from."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from gspo_services.learner.checkpoints.format import CheckpointError, CheckpointState
from gspo_services.learner.checkpoints.resumption import require_own_directory, resume
from tests.support.engines.bigram_engine import BigramEngine
from tests.support.learner.checkpoints import find_latest
from tests.support.learner.resuming import (
    saved,
    state,
    truncated,
    with_a_flipped_bit,
    with_other_metadata,
    without_a_file,
    without_metadata,
)
from tests.support.learner.saving import save_checkpoint
from tests.support.wire.zmq_ends import a_welcome


def gone(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


DAMAGES = [truncated, with_a_flipped_bit, without_a_file, without_metadata, with_other_metadata]


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_next_older_checkpoint_is_taken_and_the_damaged_one_is_kept(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    older, newest = saved(tmp_path, 2, 4)
    damage(newest)
    engine = BigramEngine(seed=9)
    with capture_logs() as logs:
        resumed = resume(engine, tmp_path)
    assert resumed is not None
    assert (resumed.path, resumed.state) == (older, state(2))
    assert torch.equal(engine.table, BigramEngine(seed=2).table)
    (line,) = [line for line in logs if line["event"] == "checkpoint_damaged"]
    assert str(newest) in line["error"]
    assert f"kept as damaged-{newest.name}, and the next older checkpoint is used. No token is lost" in line["error"]
    assert (tmp_path / f"damaged-{newest.name}").is_dir()
    assert find_latest(tmp_path) == older
    assert (tmp_path / "latest").read_text() == f"{older.name}\n"
    again = resume(BigramEngine(), tmp_path)
    assert again is not None
    assert again.path == older


def test_what_is_set_aside_stays_and_is_not_counted(tmp_path: Path) -> None:
    _, newest = saved(tmp_path, 2, 4, keep=2)
    truncated(newest)
    resume(BigramEngine(), tmp_path)
    saved(tmp_path, 3, 4, keep=2)
    truncated(newest)
    resume(BigramEngine(), tmp_path)
    saved(tmp_path, 5, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"damaged-{newest.name}",
        f"damaged-{newest.name}-2",
        "latest",
        "version-0000000004-batch-0000000003",
        "version-0000000006-batch-0000000005",
    ]


def test_without_a_whole_checkpoint_training_begins_again_and_says_so(tmp_path: Path) -> None:
    for path in saved(tmp_path, 2, 4):
        with_a_flipped_bit(path)
    engine = BigramEngine(seed=9)
    with capture_logs() as logs:
        assert resume(engine, tmp_path) is None
    assert torch.equal(engine.table, BigramEngine(seed=9).table)
    assert [line["event"] for line in logs] == ["checkpoint_damaged", "checkpoint_damaged", "no_checkpoint_left"]
    assert sorted(path.name.split("-")[0] for path in tmp_path.iterdir()) == ["damaged", "damaged"]


@pytest.mark.parametrize("pointer", ["version-0000000099-batch-0000000098\n", "../elsewhere\n", "\0", "\xff", ""])
def test_a_damaged_pointer_is_reported_and_the_newest_checkpoint_is_taken(tmp_path: Path, pointer: str) -> None:
    _, newest = saved(tmp_path, 2, 4)
    (tmp_path / "latest").write_text(pointer, encoding="latin-1")
    with capture_logs() as logs:
        resumed = resume(BigramEngine(), tmp_path)
    assert resumed is not None
    assert resumed.path == newest
    assert [line["event"] for line in logs] == ["checkpoint_pointer_damaged"]
    assert "the newest existing checkpoint is used" in logs[0]["error"]


def test_a_checkpoint_that_is_gone_is_reported_with_its_name(tmp_path: Path) -> None:
    older, newest = saved(tmp_path, 2, 4)
    gone(newest)
    with capture_logs() as logs:
        resumed = resume(BigramEngine(), tmp_path)
    assert resumed is not None
    assert resumed.path == older
    assert f"names '{newest.name}', which does not exist" in logs[0]["error"]


def test_the_newest_is_that_of_most_batches_whatever_the_versions(tmp_path: Path) -> None:
    """Batches that are trained again make checkpoints without a version."""
    saved(tmp_path, 2)
    again = CheckpointState(policy_version=0, batch_position=3, mismatch={})
    newest = save_checkpoint(BigramEngine(), tmp_path, again, keep=3)
    (tmp_path / "latest").unlink()
    assert find_latest(tmp_path) == newest
    resumed = resume(BigramEngine(), tmp_path)
    assert resumed is not None
    assert resumed.state == again


def test_a_whole_checkpoint_of_another_model_is_refused_and_stays(tmp_path: Path) -> None:
    saved(tmp_path, 2, 4)
    with pytest.raises(CheckpointError, match="vocabulary = 16, this learner has 8"):
        resume(BigramEngine(vocab_size=8), tmp_path)
    assert sorted(path.name.split("-")[0] for path in tmp_path.iterdir()) == ["latest", "version", "version"]


def test_an_empty_directory_beside_a_run_with_checkpoints_is_refused_with_the_way_out(tmp_path: Path) -> None:
    require_own_directory(tmp_path, a_welcome())
    welcome = a_welcome(policy_version=9, next_batch=8)
    with pytest.raises(CheckpointError, match=r"holds nothing of this run, .* 8 batches .* mounted.* write 9 into .*last-v"):
        require_own_directory(tmp_path, welcome)
    (tmp_path / "last-version").write_text("9\n")
    require_own_directory(tmp_path, welcome)


def test_a_directory_with_damaged_checkpoints_only_is_the_runs_own(tmp_path: Path) -> None:
    (tmp_path / "damaged-version-0000000003-batch-0000000002").mkdir()
    require_own_directory(tmp_path, a_welcome(policy_version=9, next_batch=8))


class SecondOfTwo(BigramEngine):
    """Rank 1 of two; rank 0 says which checkpoint is the newest."""

    rank = 1
    world_size = 2

    def __init__(self, *newest: tuple[int, int]) -> None:
        super().__init__()
        self.newest = list(newest)

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0) -> torch.Tensor:
        if tensor.shape == (2,) and tensor.dtype == torch.int64:
            return torch.tensor(self.newest.pop(0))
        return tensor.clone()


def test_all_ranks_take_the_checkpoint_that_the_first_one_names(tmp_path: Path) -> None:
    older, newest = saved(tmp_path, 2, 4)
    resumed = resume(SecondOfTwo((3, 2)), tmp_path)
    assert resumed is not None
    assert resumed.path == older
    # This rank's share, and so what the first one hears of it.
    for name in ("engine/table.safetensors", "random-00000.json"):
        (newest / name).write_bytes(b"")
    engine = SecondOfTwo((5, 4), (-1, -1))
    assert resume(engine, tmp_path) is None
    assert engine.newest == []
    assert newest.is_dir(), "the first rank renames it"
