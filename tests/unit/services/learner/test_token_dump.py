"""What the learner keeps for each token is what the loss computed, and finds its way back to its trajectory."""

import io
import os
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gspo.model.packing import TrainGroup
from gspo.settings import Objective
from gspo_protocol.messages import Batch, BatchItem
from gspo_services.learner.token_dump import TokenDump
from gspo_services.shared.token_dump import TokenPart, clipped_shares, read_parts, recorded_batches, write_part
from tests.support.engines.bigram_engine import BigramEngine
from tests.support.learner.trained import train
from tests.support.loss.sequences import random_groups

CLIPPING = Objective(eps_low=1e-4, eps_high=2e-4, anchor="proximal")


def batch_of(groups: list[TrainGroup]) -> Batch:
    items, trajectory = [], 100
    for number, group in enumerate(groups):
        for _ in group.sequences:
            items.append(BatchItem(trajectory, number, 1, 1, 1, 1, "done", 1.0, 64))
            trajectory += 1
    return Batch(index=7, policy_version=3, part_tokens=1, items=items)


def dumped(directory: Path, groups: list[TrainGroup], **changes: Any) -> tuple[TokenPart, dict[str, float]]:
    token_dump = TokenDump(directory, batch_of(groups), groups, rank=0, world_size=1)
    engine = BigramEngine(max_tokens_per_micro_batch=50, learning_rate=20.0)
    report = train(engine, groups, CLIPPING, policy_version=3, num_mini_batches=2, token_dump=token_dump, **changes)
    (part,) = read_parts(directory, 7)
    return part, report.metrics


def test_every_action_token_is_kept_under_its_trajectory(tmp_path: Path) -> None:
    groups = random_groups(4, 3, seed=1)
    part, _ = dumped(tmp_path, groups)
    sequences = [sequence for group in groups for sequence in group.sequences]
    assert sorted(part.trajectories_S.tolist()) == list(range(100, 100 + len(sequences)))
    for trajectory, count in zip(part.trajectories_S.tolist(), part.counts_S.tolist(), strict=True):
        assert count == sequences[trajectory - 100].num_action_tokens
    assert set(part.steps_S.tolist()) == {0, 1}
    assert recorded_batches(tmp_path) == {7}
    assert part.policy_version == 3


def test_the_numbers_are_those_of_the_loss(tmp_path: Path) -> None:
    part, metrics = dumped(tmp_path, random_groups(4, 3, seed=3))
    column = {name: part.stats_SC[:, at] for at, name in enumerate(part.columns)}
    present = column["num_tokens_S"] > 0
    assert (column["clipped_high_S"] + column["clipped_low_S"])[present].mean() == pytest.approx(
        metrics["clip_fraction/all"], abs=1e-9
    )
    assert set(part.clip_T.tolist()) == {0, 1, 2}
    ends = np.cumsum(part.counts_S)
    for at, (end, count) in enumerate(zip(ends.tolist(), part.counts_S.tolist(), strict=True)):
        tokens = slice(end - count, end)
        if not count:
            continue
        # log s of a sequence: the mean of learner minus anchor over its tokens, and one ratio for all of them.
        log_s = float((part.learner_T[tokens] - part.start_T[tokens]).astype(np.float64).mean())
        assert column["log_ratio_S"][at] == pytest.approx(log_s, abs=1e-6)
        np.testing.assert_allclose(np.log(part.ratio_T[tokens]), log_s, atol=1e-6)
        high = bool(column["log_ratio_S"][at] > column["clip_high_S"][at]) and column["advantage_S"][at] > 0
        low = bool(column["log_ratio_S"][at] < column["clip_low_S"][at]) and column["advantage_S"][at] < 0
        assert set(part.clip_T[tokens].tolist()) == {1 if high else 2 if low else 0}
        assert column["entropy_S"][at] == pytest.approx(float(part.entropy_T[tokens].mean()), abs=1e-5)


def test_a_token_dump_changes_no_weight_and_no_metric(tmp_path: Path) -> None:
    groups = random_groups(4, 3, seed=2)
    _, recorded = dumped(tmp_path, groups)
    engine = BigramEngine(max_tokens_per_micro_batch=50, learning_rate=20.0)
    plain = train(engine, groups, CLIPPING, policy_version=3, num_mini_batches=2)
    assert recorded == plain.metrics


def test_a_disk_without_room_costs_the_record_alone(tmp_path: Path) -> None:
    (tmp_path / "learner-tokens").write_text("in the way")
    groups = random_groups(2, 3, seed=1)
    token_dump = TokenDump(tmp_path, batch_of(groups), groups, rank=0, world_size=1)
    token_dump.write()
    assert (tmp_path / "learner-tokens").read_text() == "in the way"


def test_a_damaged_or_missing_part_is_named(tmp_path: Path) -> None:
    part, _ = dumped(tmp_path, random_groups(2, 3, seed=1))
    (path,) = (tmp_path / "learner-tokens").iterdir()
    data = path.read_bytes()
    flipped = bytes([*data[:3000], *(byte ^ 255 for byte in data[3000:3010]), *data[3010:]])
    for broken in (b"", data[: len(data) // 2], b"\x80\x04K\x01.", flipped):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match="not what a learner recorded"):
            read_parts(tmp_path, 7)
    path.unlink()
    assert read_parts(tmp_path, 7) == []
    write_part(tmp_path, part, rank=1, world_size=3)
    with pytest.raises(ValueError, match="batch 7 lacks the parts of ranks 0, 2 of 3"):
        read_parts(tmp_path, 7)


def test_a_part_that_unpacks_or_claims_more_than_it_has_is_named(tmp_path: Path) -> None:
    dumped(tmp_path, random_groups(2, 2, seed=4))
    (path,) = (tmp_path / "learner-tokens").iterdir()
    with np.load(path) as arrays:
        content = dict(arrays)
    np.savez_compressed(path, **content)
    with pytest.raises(ValueError, match="is compressed"):
        read_parts(tmp_path, 7)
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (1 << 50,)})
    np.savez(path, **content)
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("learner_T.npy", header.getvalue())
    with pytest.raises(ValueError, match="not what a learner recorded"):
        read_parts(tmp_path, 7)


def test_a_batch_that_fewer_ranks_trained_again_is_theirs_whatever_the_clock_says(tmp_path: Path) -> None:
    part, _ = dumped(tmp_path, random_groups(2, 3, seed=1))
    for rank in range(2):
        hours_ahead = tmp_path.stat().st_mtime + 10_800
        os.utime(write_part(tmp_path, part, rank=rank, world_size=2), (hours_ahead, hours_ahead))
    write_part(tmp_path, replace(part, policy_version=part.policy_version + 1), rank=0, world_size=1)
    (read,) = read_parts(tmp_path, 7)
    assert read.policy_version == part.policy_version + 1
    assert len(list((tmp_path / "learner-tokens").iterdir())) == 1


def test_the_share_of_clipped_tokens_is_known_without_reading_them(tmp_path: Path) -> None:
    part, _ = dumped(tmp_path, random_groups(4, 3, seed=1))
    shares, begin = clipped_shares(tmp_path, 7), 0
    for trajectory, count in zip(part.trajectories_S.tolist(), part.counts_S.tolist(), strict=True):
        clipped = part.clip_T[begin : begin + count] != 0
        begin += count
        assert shares[trajectory] == pytest.approx(clipped.mean(), abs=1e-12)
    assert 0 < sum(shares.values()) < len(shares)
    other = {"clipped_high_S": "clipped_low_S", "clipped_low_S": "clipped_high_S"}
    swapped = tuple(other.get(name, name) for name in part.columns)
    write_part(tmp_path, replace(part, columns=swapped), rank=0, world_size=1)
    assert clipped_shares(tmp_path, 7) == shares, "at either bound"
    assert clipped_shares(tmp_path, 8) == {}
    (path,) = tmp_path.glob("learner-tokens/batch-*.npz")
    write_part(tmp_path, replace(part, columns=tuple("x" + name for name in part.columns)), rank=0, world_size=1)
    with pytest.raises(ValueError, match=f"{path.name}: not what a learner recorded"):
        clipped_shares(tmp_path, 7)
