"""A rank's slice of a packed row; ``tests/ranks`` compares the gradients of several ranks with one rank's."""

from __future__ import annotations

import numpy as np
import torch

from gspo.model.packing import pack
from gspo.model.sequence_parallel import RowShare
from gspo.moe.experts import ExpertPicks
from tests.support.loss.sequences import random_sequence


def shares(size: int) -> list[RowShare]:
    return [RowShare(group=None, index=index, size=size) for index in range(size)]


def test_the_slices_of_a_row_are_the_row_and_a_segment_that_fills_it_up() -> None:
    sequences = [random_sequence(length, length, temperature=0.7) for length in (5, 9)]
    packed = pack([each.with_advantages(np.zeros(each.num_tokens, np.float32)) for each in sequences], policy_version=0)
    slices = [share.inputs(packed) for share in shares(4)]
    assert {each["input_ids"].shape for each in slices} == {(1, 4)}
    assert {each["cu_seqlens"] for each in slices} == {(0, 5, 14, 16)}
    ids = torch.cat([each["input_ids"] for each in slices], dim=1)
    positions = torch.cat([each["position_ids"] for each in slices], dim=1)
    assert torch.equal(ids[:, :14], packed.input_ids)
    assert positions.tolist() == [[*range(5), *range(9), 0, 1]]
    assert torch.equal(torch.cat([each["targets_T"] for each in slices])[:14], packed.targets_T)
    temperatures = torch.cat([each["temperatures_T"] for each in slices])
    assert torch.equal(temperatures[:14], packed.temperatures_T)
    assert temperatures[14:].tolist() == [1.0, 1.0]


def test_a_row_that_divides_gets_no_other_segment() -> None:
    sequence = random_sequence(8, 1)
    packed = pack([sequence.with_advantages(np.zeros(8, np.float32))], policy_version=0)
    for share in shares(4):
        assert share.inputs(packed)["cu_seqlens"] == (0, 8)


def test_each_slice_gets_its_tokens_experts_and_a_filling_token_different_ones() -> None:
    indices_LTK = torch.arange(2 * 5 * 2, dtype=torch.int8).reshape(2, 5, 2)
    slices = [share.own_picks(ExpertPicks(indices_LTK, 20)) for share in shares(2)]
    joined = torch.cat([each.indices_LTK for each in slices], dim=1)
    assert torch.equal(joined[:, :5], indices_LTK)
    assert joined[:, 5].tolist() == [[0, 1], [0, 1]]
