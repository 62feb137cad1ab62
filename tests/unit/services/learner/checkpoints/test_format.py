"""Checkpoint directories: whole or absent, and checked before they are loaded."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from services.learner.checkpoints.format import (
    CheckpointError,
    CheckpointState,
    find_latest,
    load_checkpoint,
)
from tests.support.engines.bigram_engine import BigramEngine
from tests.support.learner.saving import save_checkpoint


def state(policy_version: int) -> CheckpointState:
    return CheckpointState(
        policy_version=policy_version,
        batch_position=policy_version * 2,
        mismatch={"variance": 0.25, "num_updates": 3.0},
        adaptive_clip={"scale": 1.75},
    )


def test_a_checkpoint_brings_back_weights_state_and_random_numbers(tmp_path: Path) -> None:
    saved = BigramEngine(seed=1)
    path = save_checkpoint(saved, tmp_path, state(7))
    expected = (random.random(), float(np.random.random()), float(torch.rand(())))

    fresh = BigramEngine(seed=2)
    assert load_checkpoint(fresh, path) == state(7)
    assert torch.equal(fresh.table, saved.table)
    assert (random.random(), float(np.random.random()), float(torch.rand(()))) == expected


def test_a_checkpoint_older_than_the_adaptive_clip_is_read(tmp_path: Path) -> None:
    path = save_checkpoint(BigramEngine(), tmp_path, state(7))
    metadata = json.loads((path / "checkpoint.json").read_text())
    del metadata["state"]["adaptive_clip"]
    (path / "checkpoint.json").write_text(json.dumps(metadata))
    assert load_checkpoint(BigramEngine(), path) == replace(state(7), adaptive_clip={})


def test_the_latest_is_the_last_one_written_and_older_ones_are_removed(tmp_path: Path) -> None:
    assert find_latest(tmp_path) is None
    paths = [save_checkpoint(BigramEngine(), tmp_path, state(version), keep=2) for version in (1, 2, 10)]
    assert find_latest(tmp_path) == paths[2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", paths[1].name, paths[2].name]


def test_keeping_one_checkpoint_keeps_the_newest(tmp_path: Path) -> None:
    save_checkpoint(BigramEngine(), tmp_path, state(1), keep=1)
    newest = save_checkpoint(BigramEngine(), tmp_path, state(2), keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", newest.name]


def test_the_new_checkpoint_stays_even_if_an_abandoned_run_got_further(tmp_path: Path) -> None:
    further = save_checkpoint(BigramEngine(), tmp_path, state(9), keep=1)
    newest = save_checkpoint(BigramEngine(), tmp_path, state(5), keep=1)
    assert find_latest(tmp_path) == newest
    assert not further.exists()


def test_a_writer_killed_half_way_leaves_the_previous_checkpoint_and_its_partial_files_are_removed(tmp_path: Path) -> None:
    class KilledWhileSaving(BigramEngine):
        def save_state(self, directory: Path) -> None:
            super().save_state(directory)
            raise KeyboardInterrupt

    previous = save_checkpoint(BigramEngine(seed=1), tmp_path, state(1))
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(KilledWhileSaving(seed=2), tmp_path, state(2))
    rubbish = [path for path in tmp_path.iterdir() if path.name.startswith(".partial-")]
    assert len(rubbish) == 1
    assert find_latest(tmp_path) == previous
    assert load_checkpoint(BigramEngine(), previous) == state(1)
    assert find_latest(tmp_path) == previous
    save_checkpoint(BigramEngine(seed=3), tmp_path, state(3))
    assert not rubbish[0].exists()


def test_a_writer_killed_before_its_first_pointer_still_leaves_a_checkpoint(tmp_path: Path) -> None:
    path = save_checkpoint(BigramEngine(), tmp_path, state(1))
    (tmp_path / "latest").unlink()
    assert find_latest(tmp_path) == path


def test_a_pointer_to_nothing_names_what_is_there(tmp_path: Path) -> None:
    path = save_checkpoint(BigramEngine(), tmp_path, state(1))
    (tmp_path / "latest").write_text("version-0000000099\n")
    with pytest.raises(CheckpointError, match=f"names version-0000000099.*{path.name}"):
        find_latest(tmp_path)


def test_a_truncated_checkpoint_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    path = save_checkpoint(BigramEngine(seed=1), tmp_path, state(1))
    file = path / "engine" / "table.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    engine = BigramEngine(seed=2)
    before = engine.table.clone()
    with pytest.raises(CheckpointError, match=r"table\.safetensors has \d+ bytes, \d+ were written"):
        load_checkpoint(engine, path)
    assert torch.equal(engine.table, before)


def test_a_checkpoint_of_another_layout_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(BigramEngine(vocab_size=16), tmp_path, state(1))
    with pytest.raises(CheckpointError, match="vocabulary = 16, this learner has 8"):
        load_checkpoint(BigramEngine(vocab_size=8), path)


def test_weights_that_changed_on_disk_are_noticed(tmp_path: Path) -> None:
    path = save_checkpoint(BigramEngine(seed=1), tmp_path, state(1))
    BigramEngine(seed=2).save_state(path / "other")
    (path / "other" / "table.safetensors").replace(path / "engine" / "table.safetensors")
    with pytest.raises(CheckpointError, match="have digest"):
        load_checkpoint(BigramEngine(), path)


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "is damaged"), (json.dumps({"format": 99}), "has format 99"), (None, "is not a checkpoint")],
)
def test_a_directory_that_is_no_checkpoint_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    path = save_checkpoint(BigramEngine(), tmp_path, state(1))
    if content is None:
        (path / "checkpoint.json").unlink()
    else:
        (path / "checkpoint.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(BigramEngine(), path)


def test_keeping_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep is 0"):
        save_checkpoint(BigramEngine(), tmp_path, state(1), keep=0)


class OneOfTwo(BigramEngine):
    """Rank 1; rank 0 contributes the same to every sum."""

    rank = 1
    world_size = 2
    others = 0.0

    def sum_over_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor + self.others


def test_a_rank_gives_up_a_checkpoint_when_another_one_cannot_write_its_part(tmp_path: Path) -> None:
    previous = save_checkpoint(BigramEngine(seed=1), tmp_path, state(1))

    class WithAFailingPeer(OneOfTwo):
        def save_state(self, directory: Path) -> None:
            directory.parent.mkdir()  # Rank 0 would have made it.
            super().save_state(directory)
            self.others = 1.0

        def weights_digest(self) -> str:
            raise AssertionError("a collective that the other rank will not come to")

    with pytest.raises(CheckpointError, match="another rank could not write its part"):
        save_checkpoint(WithAFailingPeer(seed=2), tmp_path, state(2))
    assert find_latest(tmp_path) == previous
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", previous.name]


def test_if_there_are_more_ranks_than_before_they_take_the_random_states_in_turn(tmp_path: Path) -> None:
    path = save_checkpoint(BigramEngine(seed=1), tmp_path, state(1))
    expected = random.random()
    assert [file.name for file in path.glob("random-*")] == ["random-00000.json"]
    assert load_checkpoint(OneOfTwo(), path) == state(1)
    assert random.random() == expected


def test_a_checkpoint_of_another_format_is_refused_with_both_formats(tmp_path: Path) -> None:
    path = save_checkpoint(BigramEngine(), tmp_path, state(1))
    metadata = json.loads((path / "checkpoint.json").read_text())
    (path / "checkpoint.json").write_text(json.dumps(metadata | {"format": 1}))
    with pytest.raises(CheckpointError, match="has format 1; this learner reads 2"):
        load_checkpoint(BigramEngine(), path)
