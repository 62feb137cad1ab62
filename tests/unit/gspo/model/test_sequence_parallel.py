"""A rank's slice of a packed row; ``tests/ranks`` compares the gradients of several ranks with one rank's."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gspo.model.attention import segment_attention
from gspo.model.logprobs import TokenLogProbs
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
    assert {tuple(each["cu_seqlens"]) for each in slices} == {(0, 5, 14, 16)}
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
        assert tuple(share.inputs(packed)["cu_seqlens"]) == (0, 8)


def test_each_slice_gets_its_tokens_experts_and_a_filling_token_different_ones() -> None:
    indices_LTK = torch.arange(2 * 5 * 2, dtype=torch.int8).reshape(2, 5, 2)
    slices = [share.own_picks(ExpertPicks(indices_LTK, 20)) for share in shares(2)]
    joined = torch.cat([each.indices_LTK for each in slices], dim=1)
    assert torch.equal(joined[:, :5], indices_LTK)
    assert joined[:, 5].tolist() == [[0, 1], [0, 1]]


class Threads:
    """A process group whose ranks are threads, each of which calls ``enter`` first."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._barrier = threading.Barrier(size, timeout=60)
        self._slots: list[Tensor] = [torch.empty(0)] * size
        self._rank = threading.local()

    def enter(self, rank: int) -> None:
        self._rank.number = rank

    def all_to_all_single(self, received: Tensor, parts: Tensor, group: Threads) -> None:
        received.copy_(torch.stack([sent[self._rank.number] for sent in self._exchanged(parts)]))

    def all_gather(self, received: Sequence[Tensor], own: Tensor, group: Threads) -> None:
        for into, sent in zip(received, self._exchanged(own), strict=True):
            into.copy_(sent)

    def _exchanged(self, own: Tensor) -> list[Tensor]:
        self._slots[self._rank.number] = own.clone()
        self._barrier.wait()
        found = list(self._slots)
        self._barrier.wait()
        return found


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a function on each rank of a group of threads."""

    def on_ranks(size: int, function: Any) -> list[Any]:
        group = Threads(size)
        for name in ("all_to_all_single", "all_gather"):
            monkeypatch.setattr(torch.distributed, name, getattr(group, name))

        def of_rank(rank: int) -> Any:
            group.enter(rank)
            return function(RowShare(group=group, index=rank, size=size))

        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(of_rank, range(size)))

    return on_ranks


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("variant", [{}, {"sliding_window": 3}, {"softcap": 2.0}])
def test_attention_of_shared_rows_and_its_gradients_are_those_of_whole_rows(
    size: int, variant: dict[str, Any], run: Any
) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"query": (1, 4, 16, 8), "key": (1, 2, 16, 8), "value": (1, 2, 16, 8)}
    whole = {name: torch.randn(shape, generator=generator).requires_grad_() for name, shape in shapes.items()}
    sinks = torch.randn(4, generator=generator).requires_grad_()
    weights = torch.randn(1, 16, 4, 8, generator=generator)
    options = {"cu_seqlens": (0, 5, 12, 16), "s_aux": sinks if "softcap" in variant else None, **variant}
    output, _ = segment_attention(torch.nn.Identity(), *whole.values(), None, **options)
    (output * weights).sum().backward()

    def shared(share: RowShare) -> tuple[dict[str, Tensor], Tensor, Tensor | None]:
        tokens = slice(share.index * 16 // size, (share.index + 1) * 16 // size)
        own = {name: states.detach()[:, :, tokens].clone().requires_grad_() for name, states in whole.items()}
        own_sinks = sinks.detach().clone().requires_grad_()
        given = options | {"s_aux": None if options["s_aux"] is None else own_sinks}
        found, _ = segment_attention(torch.nn.Identity(), *own.values(), None, row_share=share, **given)
        (found * weights[:, tokens]).sum().backward()
        return {name: states.grad for name, states in own.items()}, found.detach(), own_sinks.grad

    results = run(size, shared)
    torch.testing.assert_close(torch.cat([found for _, found, _ in results], dim=1), output.detach(), rtol=0, atol=1e-6)
    for name, states in whole.items():
        gradient = torch.cat([gradients[name] for gradients, _, _ in results], dim=2)
        torch.testing.assert_close(gradient, states.grad, rtol=0, atol=1e-5)
    if options["s_aux"] is not None:
        torch.testing.assert_close(sum(gradient for _, _, gradient in results), sinks.grad, rtol=0, atol=1e-5)


def test_log_probs_come_back_whole_and_only_the_own_slice_has_a_gradient(run: Any) -> None:
    picks_LTK = torch.arange(2 * 6 * 2, dtype=torch.int16).reshape(2, 6, 2)

    def shared(share: RowShare) -> tuple[TokenLogProbs, Tensor]:
        own = torch.arange(share.index * 3.0, share.index * 3.0 + 3).requires_grad_()
        experts = ExpertPicks(picks_LTK[:, share.index * 3 : share.index * 3 + 3], 300)
        result = share.whole(TokenLogProbs(own, own.detach() + 100, experts, experts), 5)
        (result.logprobs_T * torch.arange(1.0, 6)).sum().backward()
        return result, own.grad

    for rank, (result, gradient) in enumerate(run(2, shared)):
        assert result.logprobs_T.tolist() == [0, 1, 2, 3, 4]
        assert result.entropies_T is not None
        assert result.entropies_T.tolist() == [100, 101, 102, 103, 104]
        assert result.experts is not None
        assert torch.equal(result.experts.indices_LTK, picks_LTK[:, :5])
        assert result.own_experts is not None
        assert torch.equal(result.own_experts.indices_LTK, picks_LTK[:, :5])
        assert gradient.tolist() == ([1, 2, 3], [4, 5, 0])[rank]
