"""Checkpoint directories: whole or absent, and checked before they are loaded."""

from __future__ import annotations

import errno
import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from gspo_services.learner.checkpoints.digests import FileDigest, find_damage
from gspo_services.learner.checkpoints.format import (
    CheckpointError,
    CheckpointState,
    DamagedCheckpoint,
    load_checkpoint,
    read_metadata,
)
from tests.support.engines.bigram_engine import BigramEngine
from tests.support.learner.checkpoints import find_latest
from tests.support.learner.saving import save_checkpoint


def state(policy_version: int) -> CheckpointState:
    return CheckpointState(
        policy_version=policy_version,
        batch_position=policy_version * 2,
        mismatch={"variance": 0.25, "num_updates": 3.0},
        adaptive_clip={"scale": 1.75},
        calibration={"format": 1, "sequences": [[1.0, 5.0, -0.25, 0.5]]},
    )


def test_a_checkpoint_brings_back_weights_state_and_random_numbers(tmp_path: Path) -> None:
    saved = BigramEngine(seed=1)
    path = save_checkpoint(saved, tmp_path, state(7))
    expected = (random.random(), float(np.random.random()), float(torch.rand(())))

    fresh = BigramEngine(seed=2)
    assert load_checkpoint(fresh, path) == state(7)
    assert torch.equal(fresh.table, saved.table)
    assert (random.random(), float(np.random.random()), float(torch.rand(()))) == expected


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
        def save_state(self, directory: Path) -> list[Path]:
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
    with pytest.raises(CheckpointError, match=r"table\.safetensors has digest .* was written"):
        load_checkpoint(BigramEngine(), path)


@pytest.mark.parametrize("content", ["{", "[]", "3", '{"format": 1}', '{"format": "new"}', "[" * 100_000, None])
def test_a_directory_without_sound_metadata_is_damaged(tmp_path: Path, content: str | None) -> None:
    path = save_checkpoint(BigramEngine(), tmp_path, state(1))
    if content is None:
        (path / "checkpoint.json").unlink()
    else:
        (path / "checkpoint.json").write_text(content)
    with pytest.raises(DamagedCheckpoint, match=r"checkpoint\.json is damaged"):
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
        def save_state(self, directory: Path) -> list[Path]:
            directory.parent.mkdir()  # Rank 0 would have made it.
            written = super().save_state(directory)
            self.others = 1.0
            return written

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


@pytest.mark.parametrize("other", [2, 3])
def test_a_checkpoint_of_another_format_is_refused_with_both_formats_and_is_not_damaged(tmp_path: Path, other: int) -> None:
    path = save_checkpoint(BigramEngine(), tmp_path, state(1))
    metadata = json.loads((path / "checkpoint.json").read_text())
    del metadata["digest"]
    (path / "checkpoint.json").write_text(json.dumps(metadata | {"format": other}))
    with pytest.raises(CheckpointError, match=f"has format {other}; this learner reads 1: continue the run with") as caught:
        load_checkpoint(BigramEngine(), path)
    assert not isinstance(caught.value, DamagedCheckpoint)


@pytest.mark.parametrize("bit", range(8))
def test_one_changed_bit_anywhere_is_found_before_anything_is_loaded(tmp_path: Path, bit: int) -> None:
    path = save_checkpoint(BigramEngine(vocab_size=4, seed=1), tmp_path, state(1))
    engine = BigramEngine(vocab_size=4, seed=2)
    before = engine.table.clone()
    for file in sorted(path.rglob("*.*")):
        content = file.read_bytes()
        # Bits all over the small files and the long one, other ones in each case.
        for at in range(bit, len(content), 7 if len(content) < 2000 else 997):
            changed = bytearray(content)
            changed[at] ^= 1 << bit
            file.write_bytes(changed)
            if file.name == "checkpoint.json" and _means_the_same(changed, content):
                continue  # white space
            with pytest.raises(DamagedCheckpoint, match=file.name):
                load_checkpoint(engine, path)
        file.write_bytes(content)
    assert torch.equal(engine.table, before)
    assert load_checkpoint(engine, path) == state(1)


def _means_the_same(changed: bytes, content: bytes) -> bool:
    try:
        return bool(json.loads(changed) == json.loads(content))
    except ValueError:
        return False


class SecondOfTwo(BigramEngine):
    """Rank 1 of two; rank 0 finds ``found``."""

    rank = 1
    world_size = 2

    def __init__(self, found: str) -> None:
        super().__init__()
        self.found = found

    def sum_over_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor + torch.tensor([len(self.found), 0])

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0) -> torch.Tensor:
        return torch.tensor(list(self.found.encode()), dtype=torch.uint8) if source == 0 else tensor


@pytest.mark.parametrize(("kind", "damaged"), [("1", True), ("0", False)])
def test_what_one_rank_finds_is_raised_on_every_rank(tmp_path: Path, kind: str, damaged: bool) -> None:
    path = save_checkpoint(BigramEngine(), tmp_path, state(1))
    with pytest.raises(CheckpointError, match=r"^the first rank's share$") as caught:
        load_checkpoint(SecondOfTwo(f"{kind}the first rank's share"), path)
    assert isinstance(caught.value, DamagedCheckpoint) == damaged


def test_each_rank_verifies_a_share_and_all_shares_are_the_whole(tmp_path: Path) -> None:
    path = save_checkpoint(BigramEngine(), tmp_path, state(1))
    names = read_metadata(path)["files"]
    assert len(names) == 4
    for name, each in names.items():
        file = path / name
        content = file.read_bytes()
        file.write_bytes(content[:-1] + b"?")
        found = [find_damage(path, {key: FileDigest(**value) for key, value in names.items()}, rank, 2) for rank in (0, 1)]
        assert [bool(text) for text in found].count(True) == 1, each
        assert name in "".join(found)
        file.write_bytes(content)


@pytest.mark.parametrize("kind", ["link", "folder", "pipe", "added"])
def test_what_others_put_into_a_checkpoint_is_refused_before_it_is_opened(kind: str, tmp_path: Path) -> None:
    path = save_checkpoint(BigramEngine(), tmp_path / "root", state(1))
    file = next((path / "engine").iterdir())
    aside = tmp_path / file.name
    if kind == "link":
        file.rename(aside)
        file.symlink_to(aside)
    elif kind == "folder":
        (path / "engine").rename(aside)
        (path / "engine").symlink_to(aside)
    elif kind == "pipe":
        file.unlink()
        os.mkfifo(file)
    else:
        (path / "engine" / "zz.safetensors").write_bytes(b"")
    texts = {
        "link": f"{file} is a link, or lies behind one",
        "folder": "is a link, or lies behind one",
        "pipe": f"{file} is no regular file",
        "added": f"{path / 'engine' / 'zz.safetensors'} is not among the files that were written",
    }
    with pytest.raises(DamagedCheckpoint, match=texts[kind]):
        load_checkpoint(BigramEngine(), path)


@pytest.mark.parametrize("name", ["../latest", "/etc/hostname", "engine/../../latest", "x\0"])
def test_a_checkpoint_names_no_file_outside(name: str, tmp_path: Path) -> None:
    path = save_checkpoint(BigramEngine(), tmp_path, state(1))
    assert "is no plain relative name" in (found := find_damage(path, {name: FileDigest(1, "")}, 0, 1)) or "\\x00" in found


def test_a_checkpoint_on_a_disk_that_is_away_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_checkpoint(BigramEngine(), tmp_path, state(1))

    opened = os.open

    def away(name: str, flags: int, **options: int) -> int:
        if str(name).startswith("random-"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return opened(name, flags, **options)

    monkeypatch.setattr(os, "open", away)
    with pytest.raises(CheckpointError, match="Stale file handle") as caught:
        load_checkpoint(BigramEngine(), path)
    assert type(caught.value) is CheckpointError
