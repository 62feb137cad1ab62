"""Recorded experts against the router logits that transformers returns, and their sums against counting by hand."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gspo.model.packing import PackedBatch
from gspo.moe.experts import ExpertPicks, ExpertRecorder, ExpertShape, ExpertTally
from tests.support.learner.tiny_model import TINY_VOCAB_SIZE, tiny_qwen3_moe
from tests.support.policy.experts import LENGTHS, NUM_EXPERTS, NUM_LAYERS, TOP_K, packed_batch, prepared, recorded

Chosen = list[list[set[int]]]
"""By layer and token."""


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def by_router_logits(model: Any, packed: PackedBatch) -> Chosen:
    """The experts with the largest logits, each sequence alone through the model as transformers made it."""
    chosen: Chosen = [[] for _ in range(NUM_LAYERS)]
    for start, end in pairwise(packed.cu_seqlens):
        with torch.no_grad():
            logits = model(input_ids=packed.input_ids[:, start:end], output_router_logits=True).router_logits
        for layer, logits_TE in enumerate(logits):
            chosen[layer] += [set(np.argsort(row)[-TOP_K:].tolist()) for row in logits_TE.numpy()]
    return chosen


def picks_of(model: Any, packed: PackedBatch) -> ExpertPicks:
    picks = recorded(model, packed)[1]
    assert picks is not None
    return picks


def perturbed(seed: int = 0) -> Any:
    """The tiny model with other routers."""
    model = tiny_qwen3_moe(seed)
    generator = torch.Generator().manual_seed(7)
    for layer in model.model.layers:
        with torch.no_grad():
            layer.mlp.gate.weight += 0.02 * torch.randn(layer.mlp.gate.weight.shape, generator=generator)
    return model


def num_hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


def test_recorded_experts_have_the_largest_router_logits_and_recomputation_adds_none() -> None:
    packed = packed_batch()
    recorder, picks, logprobs_T = recorded(prepared(tiny_qwen3_moe()), packed)
    assert picks is not None
    assert picks.num_experts == NUM_EXPERTS
    assert picks.indices_LTK.shape == (NUM_LAYERS, sum(LENGTHS), TOP_K)
    found = [[set(token) for token in layer] for layer in picks.indices_LTK.tolist()]
    assert found == by_router_logits(tiny_qwen3_moe(), packed)
    logprobs_T.sum().backward()  # type: ignore[no-untyped-call]
    assert recorder.take() is None


def test_load_counts_the_action_tokens_of_all_micro_batches_and_ranks() -> None:
    model = prepared(tiny_qwen3_moe())
    batches = [packed_batch(), packed_batch((25, 6))]
    counts = np.zeros((NUM_LAYERS, NUM_EXPERTS))
    for packed in batches:
        for layer, tokens in enumerate(by_router_logits(tiny_qwen3_moe(), packed)):
            for experts, counted in zip(tokens, packed.mask_T.tolist(), strict=True):
                for expert in experts:
                    counts[layer, expert] += counted
    # A rank for each micro-batch, and one that had nothing to do.
    tallies = [ExpertTally(), ExpertTally(), ExpertTally()]
    for tally, packed in zip(tallies, batches, strict=False):
        picks = picks_of(model, packed)
        tally.add(picks, packed.mask_T, packed.sequence_ids_T, torch.zeros(packed.num_sequences), reference=None)
    metrics = metrics_of_ranks(tallies)
    assert metrics[0] == metrics[1] == metrics[2]
    assert metrics[0]["expert_load_max_over_mean/all"] == pytest.approx((counts.max(1) / counts.mean(1)).mean())
    assert metrics[0]["expert_load_unused/all"] == 0
    assert len(metrics[0]) == 2


def metrics_of_ranks(tallies: Sequence[ExpertTally]) -> list[dict[str, float]]:
    """Return what each rank gets when every rank is a thread."""
    barrier = threading.Barrier(len(tallies), timeout=60)
    given = [torch.zeros(0)] * len(tallies)

    def metrics_of(rank: int) -> dict[str, float]:
        def sum_over_ranks(tensor: Tensor) -> Tensor:
            given[rank] = tensor
            barrier.wait()
            total = torch.stack(given).sum(dim=0)
            barrier.wait()
            return total

        return tallies[rank].metrics(sum_over_ranks)

    with ThreadPoolExecutor(len(tallies)) as pool:
        return list(pool.map(metrics_of, range(len(tallies))))


def test_an_expert_that_only_observations_chose_counts_as_unused() -> None:
    picks = ExpertPicks(torch.tensor([[[0, 1], [0, 1], [2, 3]], [[0, 3], [1, 3], [2, 3]]], dtype=torch.int8), 5)
    mask_T = torch.tensor([True, True, False])
    tally = ExpertTally()
    tally.add(picks, mask_T, torch.tensor([0, 0, 1]), torch.zeros(2), reference=None)
    metrics = tally.metrics(torch.clone)
    # 2 + 2 picks in each layer over 5 experts. First layer: two experts with 2 each. Second: 0 and 1 once, 3 twice.
    assert metrics == {
        "expert_load_max_over_mean/all": pytest.approx(2 / (4 / 5)),
        "expert_load_unused/all": pytest.approx((3 + 2) / 10),
    }


def test_changed_experts_are_the_share_of_picks_outside_the_reference_by_lag() -> None:
    packed = packed_batch()
    before, after = (by_router_logits(model, packed) for model in (tiny_qwen3_moe(), perturbed()))
    lags = [0.0, 2.5, 0.5]
    changed, total = np.zeros(3), np.zeros(3)
    for layer in range(NUM_LAYERS):
        for token, sequence in enumerate(packed.sequence_ids_T.tolist()):
            if packed.mask_T[token]:
                changed[sequence] += len(after[layer][token] - before[layer][token])
                total[sequence] += TOP_K
    assert 0 < changed.sum() < total.sum() / 2
    reference, picks = (picks_of(prepared(model), packed) for model in (tiny_qwen3_moe(), perturbed()))
    tally = ExpertTally()
    tally.add(picks, packed.mask_T, packed.sequence_ids_T, torch.tensor(lags), reference=reference)
    metrics = tally.metrics(torch.clone)
    assert {name: value for name, value in metrics.items() if "changed" in name} == {
        "experts_changed/all": pytest.approx(changed.sum() / total.sum()),
        "experts_changed/lag_0": pytest.approx(changed[0] / total[0]),
        "experts_changed/lag_1": pytest.approx(changed[2] / total[2]),
        "experts_changed/lag_3_4": pytest.approx(changed[1] / total[1]),
    }


def test_the_same_experts_in_another_order_have_not_changed() -> None:
    indices = torch.tensor([[[0, 1], [2, 3]]], dtype=torch.int8)
    tally = ExpertTally()
    ids, mask = torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool)
    tally.add(ExpertPicks(indices, 4), mask, ids, torch.zeros(1), reference=ExpertPicks(indices.flip(-1), 4))
    assert tally.metrics(torch.clone)["experts_changed/all"] == 0


def test_layers_that_differ_from_an_engines_choice_are_counted_by_lag_where_it_is_known() -> None:
    """Three sequences of two tokens; the second token of the second one is an observation."""
    own = torch.tensor([[0, 1], [1, 2], [0, 1], [0, 1], [2, 3], [0, 3]], dtype=torch.int16)
    reported = torch.tensor([[1, 0], [1, 3], [-1, -1], [2, 3], [3, 2], [1, 2]], dtype=torch.int16)
    mask_T, ids_T = torch.tensor([True, True, True, False, True, True]), torch.tensor([0, 0, 1, 1, 2, 2])
    tally, empty = ExpertTally(compares=True), ExpertTally(compares=True)
    picks = ExpertPicks(torch.stack([own, own]), 4)
    same_layer = own.clone()
    same_layer[2] = -1
    reported_TLK = torch.stack([reported, same_layer], dim=1)
    lag_S = torch.tensor([0.0, 1.0, 2.0])
    tally.add(picks, mask_T, ids_T, lag_S, reference=None)
    tally.compare(picks, reported_TLK, mask_T, ids_T, lag_S)
    # A micro-batch whose engine reported nothing.
    tally.compare(None, None, torch.tensor([True, False]), torch.tensor([0, 0]), torch.zeros(1))
    for metrics in metrics_of_ranks([tally, empty]):
        assert {name: value for name, value in metrics.items() if not name.startswith("expert_load")} == {
            "experts_replayed/all": pytest.approx(4 / 6),
            "experts_differ/all": pytest.approx(2 / 8),
            "experts_differ/lag_0": pytest.approx(1 / 4),
            "experts_differ/lag_2": pytest.approx(1 / 4),
        }


@pytest.mark.parametrize(
    ("shape", "error"),
    [
        (
            (5, 3, 2),
            "reported 2 experts a token in 3 layers, and the learner's model has 2 in 2 layers with routers",
        ),
        ((5, 2, 3), "an engine reported 3 experts a token in 2 layers, and the learner's model has 2 in 2 layers"),
    ],
)
def test_experts_of_another_model_are_refused(shape: tuple[int, int, int], error: str) -> None:
    of_model = ExpertShape.of(tiny_qwen3_moe())
    assert of_model == ExpertShape(NUM_LAYERS, TOP_K, NUM_EXPERTS)
    with pytest.raises(ValueError, match=error):
        of_model.require(torch.zeros(shape, dtype=torch.int16))
    of_model.require(torch.full((5, 2, 2), NUM_EXPERTS - 1))
    with pytest.raises(ValueError, match=r"reported expert 4, and the learner's model has 0 to 3: .* = \"learner\""):
        of_model.require(torch.full((5, 2, 2), NUM_EXPERTS))


def test_a_dense_model_has_no_picks_and_no_metrics() -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=TINY_VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    assert recorded(prepared(Qwen3ForCausalLM(config)), packed_batch())[1] is None
    assert ExpertTally().metrics(torch.clone) == {}


def test_no_hook_stays_and_each_pass_begins_anew() -> None:
    model = prepared(tiny_qwen3_moe())
    hooks_before = num_hooks(model)
    recorder = ExpertRecorder(model)
    with recorder.recording():
        model.model(input_ids=torch.tensor([[1, 2, 3]]), cu_seqlens=(0, 3))
        assert num_hooks(model) == hooks_before + NUM_LAYERS
    with pytest.raises(ValueError, match="ends at 4"), recorder.recording():
        model.model(input_ids=torch.tensor([[1, 2, 3]]), cu_seqlens=(0, 4))
    assert num_hooks(model) == hooks_before
    with recorder.recording():
        model.model(input_ids=torch.tensor([[1, 2, 3, 4, 5]]), cu_seqlens=(0, 5))
    picks = recorder.take()
    assert picks is not None
    assert picks.indices_LTK.shape == (NUM_LAYERS, 5, TOP_K)


class Config:
    def to_dict(self) -> dict[str, Any]:
        return {"num_experts": 5, "num_experts_per_tok": 2}


class TokenChoiceRouter(nn.Module):
    """A router like DeepSpeed's: weights, indices, histogram, and a gate inside that is not a second choice."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(3, num_experts)

    def forward(self, hidden_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values, indices = self.gate(hidden_TH).topk(2)
        return values, indices, torch.bincount(indices.reshape(-1), minlength=self.gate.out_features)


class OneHotRouter(nn.Module):
    """A router that returns its choice as zeros and ones, which are not indices."""

    def __init__(self, num_inputs: int, num_experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(num_inputs, num_experts)

    def forward(self, hidden_TH: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.gate(hidden_TH)
        return torch.zeros_like(logits, dtype=torch.int64).scatter(-1, logits.topk(2).indices, 1), logits


class TwoLayers(nn.Module):
    config = Config()

    def __init__(self, routers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"router": router}) for router in routers)

    def forward(self, hidden_TH: Tensor) -> list[Any]:
        return [layer["router"](hidden_TH) for layer in self.layers]  # type: ignore[index]


def routed(routers: Sequence[nn.Module]) -> tuple[list[Any], ExpertPicks | None]:
    model = TwoLayers(routers)
    recorder = ExpertRecorder(model)
    with recorder.recording():
        outputs = model(torch.randn(6, 3, generator=torch.Generator().manual_seed(0)))
    return outputs, recorder.take()


def test_routers_that_return_a_histogram_a_mask_or_logits_alone_are_read_as_well() -> None:
    torch.manual_seed(0)
    outputs, picks = routed([TokenChoiceRouter(200), TokenChoiceRouter(200)])
    assert picks is not None
    assert picks.num_experts == 200
    assert torch.equal(picks.indices_LTK.long(), torch.stack([output[1] for output in outputs]))
    for router in (nn.Linear, OneHotRouter):
        outputs, picks = routed([router(3, 5), router(3, 5)])
        assert picks is not None
        logits = torch.stack(outputs if router is nn.Linear else [output[1] for output in outputs])
        assert torch.equal(picks.indices_LTK.long().sort(-1).values, logits.topk(2).indices.sort(-1).values)


def test_layers_that_do_not_agree_are_not_measured() -> None:
    assert routed([nn.Linear(3, 5), nn.Linear(3, 6)])[1] is None
