"""Replayed experts against a mixture of experts computed by hand, and against the same model without replay."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gspo.model.logprobs import TokenLogProbs
from gspo.model.packing import PackedBatch
from gspo.moe.experts import ExpertPicks, ExpertRecorder, changed_share
from gspo.moe.routing_replay import RoutingReplay
from tests.support.learner.tiny_model import TINY_VOCAB_SIZE, tiny_qwen3_moe
from tests.support.policy.experts import LENGTHS, NUM_EXPERTS, NUM_LAYERS, TOP_K, packed_batch, prepared, recorded

NUM_TOKENS = sum(LENGTHS)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def forward(model: Any, packed: PackedBatch) -> TokenLogProbs:
    recorder = ExpertRecorder(model)
    with recorder.recording():
        result: TokenLogProbs = model(
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            cu_seqlens=packed.cu_seqlens,
            targets_T=packed.targets_T,
            temperatures_T=packed.temperatures_T,
        )
    return result._replace(experts=recorder.take())


def picks_of(result: TokenLogProbs) -> ExpertPicks:
    assert result.experts is not None
    return result.experts


def move_routers(model: Any, size: float = 0.3) -> None:
    generator = torch.Generator().manual_seed(7)
    for layer in model.model.layers:
        with torch.no_grad():
            layer.mlp.gate.weight += size * torch.randn(layer.mlp.gate.weight.shape, generator=generator)


def random_picks(seed: int = 0, num_layers: int = NUM_LAYERS, num_tokens: int = NUM_TOKENS) -> ExpertPicks:
    order = torch.rand(num_layers, num_tokens, NUM_EXPERTS, generator=torch.Generator().manual_seed(seed)).argsort(-1)
    return ExpertPicks(order[..., :TOP_K].to(torch.int8), NUM_EXPERTS)


def test_the_replay_of_a_pass_under_its_own_weights_is_that_pass_bit_for_bit() -> None:
    packed, model = packed_batch(), prepared(tiny_qwen3_moe())
    before = forward(model, packed)
    with RoutingReplay(model).replaying(picks_of(before)):
        again = forward(model, packed)
    assert torch.equal(again.logprobs_T, before.logprobs_T)


def test_with_other_routers_the_experts_stay_and_without_replay_they_change() -> None:
    packed, model = packed_batch(), prepared(tiny_qwen3_moe())
    before = picks_of(forward(model, packed))
    move_routers(model)
    with RoutingReplay(model).replaying(before):
        replayed = forward(model, packed)
    free = forward(model, packed)
    assert changed_share(picks_of(replayed), before) == 0
    assert 0.01 < changed_share(picks_of(free), before) < 0.9
    assert (replayed.logprobs_T - free.logprobs_T).abs().max() > 0.01


def test_a_token_without_picks_chooses_by_its_router_and_the_others_have_theirs() -> None:
    """The choices of a partial replay, replayed whole, are the same pass; so are its gradients."""
    packed, model = packed_batch(), prepared(tiny_qwen3_moe())
    given = random_picks()
    given.indices_LTK[:, ::3] = -1
    replay = RoutingReplay(model)
    with replay.replaying(given, partial=True):
        result = forward(model, packed)
        own = replay.take_own()
        result.logprobs_T.sum().backward()  # type: ignore[no-untyped-call]
    assert replay.take_own() is None, "backward has computed the layers again"
    made = picks_of(result)
    known_T = given.indices_LTK[0, :, 0] >= 0
    assert torch.equal(made.indices_LTK[:, known_T], given.indices_LTK[:, known_T])
    assert own is not None
    assert torch.equal(made.indices_LTK[:, ~known_T], own.indices_LTK[:, ~known_T])
    assert 0.2 < changed_share(own, made) < 0.8
    with replay.replaying(made):
        again = forward(model, packed)
    assert torch.equal(again.logprobs_T, result.logprobs_T)
    assert replay.take_own() is None
    partial, whole = gradients(model, packed, given, partial=True), gradients(model, packed, made)
    assert all(torch.equal(partial[name], whole[name]) for name in whole)


def test_what_a_router_would_have_chosen_beside_its_picks_is_the_top_of_its_logits() -> None:
    model = tiny_qwen3_moe()
    block = model.model.layers[0].mlp
    hidden_TH = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(1))
    replay = RoutingReplay(model)
    with replay.replaying(random_picks(num_tokens=5), partial=True):
        block(hidden_TH)
        own = replay.take_own()
    assert own is not None
    expected = (hidden_TH[0] @ block.gate.weight.T).topk(TOP_K).indices
    assert own.indices_LTK[0].sort().values.tolist() == expected.sort().values.tolist()


@pytest.mark.parametrize("normalised", [True, False])
def test_gates_are_the_present_softmax_at_the_recorded_experts(normalised: bool) -> None:
    model = tiny_qwen3_moe()
    block = model.model.layers[0].mlp
    block.gate.norm_topk_prob = normalised
    hidden_TH = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(1))
    picks = random_picks(num_tokens=5)
    with RoutingReplay(model).replaying(picks):
        output_TH = block(hidden_TH)[0]
    for token in range(5):
        probabilities = torch.softmax(block.gate.weight @ hidden_TH[0, token], -1)
        chosen = picks.indices_LTK[0, token].tolist()
        total = sum(probabilities[expert] for expert in chosen) if normalised else 1
        expected = torch.zeros(64)
        for expert in chosen:
            gate, up = (block.experts.gate_up_proj[expert] @ hidden_TH[0, token]).chunk(2)
            expected += probabilities[expert] / total * (block.experts.down_proj[expert] @ (nn.functional.silu(gate) * up))
        torch.testing.assert_close(output_TH[token], expected, rtol=1e-4, atol=1e-5)


def gradients(model: Any, packed: PackedBatch, picks: ExpertPicks, *, partial: bool = False) -> dict[str, Tensor]:
    model.zero_grad()
    with RoutingReplay(model).replaying(picks, partial=partial):
        forward(model, packed).logprobs_T.sum().backward()  # type: ignore[no-untyped-call]
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_activation_checkpointing_replays_in_the_second_computation_too() -> None:
    packed, picks = packed_batch(), random_picks()
    checkpointed = prepared(tiny_qwen3_moe())
    plain = prepared(tiny_qwen3_moe())
    plain.gradient_checkpointing_disable()
    found, expected = gradients(checkpointed, packed, picks), gradients(plain, packed, picks)
    assert set(found) == set(expected) == {name for name, _ in plain.named_parameters()}
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6)


def test_the_router_gets_the_gradient_of_its_gates() -> None:
    packed, picks = packed_batch(), random_picks()
    model = prepared(tiny_qwen3_moe())
    weight = model.model.layers[1].mlp.gate.weight
    gradient = gradients(model, packed, picks)["model.layers.1.mlp.gate.weight"]
    assert (gradient.abs() > 1e-4).all()
    sums = []
    for shift in (0.02, -0.02):
        with torch.no_grad(), RoutingReplay(model).replaying(picks):
            weight[2, 3] += shift
            hidden = model.model(input_ids=packed.input_ids, position_ids=packed.position_ids, cu_seqlens=packed.cu_seqlens)
            logits = hidden.last_hidden_state[0] @ model.lm_head.weight.t()
            sums.append(torch.log_softmax(logits, -1).gather(-1, packed.targets_T[:, None]).sum())
            weight[2, 3] -= shift
    assert float(gradient[2, 3]) == pytest.approx(float(sums[0] - sums[1]) / 0.04, rel=0.02)


def test_a_recorder_that_was_on_before_sees_the_replayed_experts() -> None:
    packed, model, picks = packed_batch(), prepared(tiny_qwen3_moe()), random_picks()
    recorder = ExpertRecorder(model)
    with recorder.recording(), RoutingReplay(model).replaying(picks):
        model.model(input_ids=packed.input_ids, position_ids=packed.position_ids, cu_seqlens=packed.cu_seqlens)
    seen = recorder.take()
    assert seen is not None
    assert torch.equal(seen.indices_LTK, picks.indices_LTK)


def test_nothing_stays_after_a_replay_that_failed() -> None:
    packed, model = packed_batch(), prepared(tiny_qwen3_moe())
    before = forward(model, packed)
    replay = RoutingReplay(model)
    with (
        pytest.raises(ValueError, match="has 56 tokens in this pass, the picks have 55"),
        replay.replaying(random_picks(0, 2, 55)),
    ):
        forward(model, packed)
    assert torch.equal(forward(model, packed).logprobs_T, before.logprobs_T)
    assert all("forward" not in layer.mlp.gate.__dict__ for layer in model.model.layers)


def test_a_forward_of_a_routers_own_is_kept() -> None:
    packed, model = packed_batch(), prepared(tiny_qwen3_moe())
    gate = model.model.layers[0].mlp.gate
    original, calls = gate.forward, []
    gate.forward = lambda hidden: calls.append(1) or original(hidden)
    with RoutingReplay(model).replaying(random_picks()):
        forward(model, packed)
    forward(model, packed)
    assert len(calls) == 2


def test_picks_of_another_model_are_refused_with_both_values() -> None:
    packed, replay = packed_batch(), RoutingReplay(model := prepared(tiny_qwen3_moe()))
    picks = random_picks()
    cases = [
        (random_picks(num_layers=3), "picks cover 3 layers, the model has 2 routers"),
        (ExpertPicks(picks.indices_LTK[..., :1], 4), r"layers\.0\.mlp\.gate has 2 experts per token .* the picks have 1"),
        (ExpertPicks(picks.indices_LTK, 8), r"layers\.0\.mlp\.gate has 4 experts in this pass, the picks have 8"),
        (ExpertPicks(picks.indices_LTK, 3), "picks hold experts 0 to 3, the model has 0 to 2"),
        (ExpertPicks(picks.indices_LTK - 1, 4), "picks hold experts -1 to 2"),
    ]
    for wrong, message in cases:
        with pytest.raises(ValueError, match=message), replay.replaying(wrong):
            forward(model, packed)


def small(name: str) -> Any:
    """A tiny random model of another family."""
    import transformers

    common = {
        "vocab_size": TINY_VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "pad_token_id": 0,
    }
    sizes: dict[str, dict[str, Any]] = {
        "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
        "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
        "Qwen2Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
        "DeepseekV3": {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 0,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 16,
        },
        # One group, chosen by the two best of as many as are chosen then.
        "Glm4Moe": {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 0,
            "moe_intermediate_size": 16,
        },
        "Qwen3": {"head_dim": 8},
    }
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**common, **sizes[name])
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def move_everything(model: Any) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)


@pytest.mark.parametrize("family", ["Mixtral", "Olmoe", "Qwen2Moe", "GptOss", "DeepseekV3", "Glm4Moe"])
def test_other_families_are_replayed_with_their_own_gates(family: str) -> None:
    model, ids = small(family), torch.arange(3, 20)[None]
    recorder, replay = ExpertRecorder(model), RoutingReplay(model)

    def run(picks: ExpertPicks | None) -> tuple[Tensor, ExpertPicks]:
        with torch.no_grad(), recorder.recording(), nullcontext() if picks is None else replay.replaying(picks):
            logits = model(input_ids=ids).logits
        taken = recorder.take()
        assert taken is not None
        return logits, taken

    logits, picks = run(None)
    assert torch.equal(run(picks)[0], logits)
    move_everything(model)
    assert changed_share(run(None)[1], picks) > 0.1
    assert changed_share(run(picks)[1], picks) == 0


def test_a_model_that_cannot_be_replayed_is_refused() -> None:
    with pytest.raises(ValueError, match="Qwen3ForCausalLM has no routers"):
        RoutingReplay(small("Qwen3"))


class TwiceRouter(nn.Module):
    """The best expert, and the best two: which of them is the choice?"""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(3, 5)

    def forward(self, hidden_TH: Tensor) -> Tensor:
        scores = self.gate(hidden_TH)
        return scores.topk(2, dim=-1).indices + scores.topk(2, dim=-1).indices


def test_a_router_that_chooses_more_than_once_is_refused() -> None:
    model = nn.ModuleDict({"router": TwiceRouter()})
    picks = ExpertPicks(torch.zeros(1, 4, 2, dtype=torch.int8), 5)
    with (
        pytest.raises(ValueError, match=r"router \(TwiceRouter\) chooses by topk 2 times"),
        RoutingReplay(model).replaying(picks),
    ):
        model["router"](torch.randn(4, 3))


class WeightsFirstRouter(nn.Module):
    """A router like DeepSpeed's: unsorted, topk as method or function, gates gathered separately, and a histogram."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(3, 5)

    def forward(self, hidden_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = self.gate(hidden_TH).sigmoid()
        indices = (scores + 1).topk(k=2, dim=-1, sorted=False).indices
        return scores.gather(1, indices), indices, torch.bincount(indices.reshape(-1), minlength=5)


def test_a_router_that_gathers_its_gates_itself_is_replayed_histogram_included() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"router": WeightsFirstRouter()})
    hidden_TH = torch.randn(3, 3)
    indices = torch.tensor([[0, 1], [4, 1], [2, 0]])
    with RoutingReplay(model).replaying(ExpertPicks(indices[None].to(torch.int16), 5)):
        gates, found, histogram = model["router"](hidden_TH)
    assert torch.equal(found, indices)
    assert histogram.tolist() == [2, 2, 1, 0, 1]
    assert torch.equal(gates, model["router"].gate(hidden_TH).sigmoid().gather(1, indices))


def test_the_changed_share_is_of_the_tokens_that_count() -> None:
    before = ExpertPicks(torch.tensor([[[0, 1], [2, 3], [0, 2]]], dtype=torch.int8), 4)
    after = ExpertPicks(torch.tensor([[[1, 0], [2, 0], [1, 3]]], dtype=torch.int8), 4)
    assert changed_share(after, before) == 3 / 6
    assert changed_share(after, before, torch.tensor([True, True, False])) == 1 / 4
    with pytest.raises(ValueError, match="mask_T selects none of 3 tokens"):
        changed_share(after, before, torch.zeros(3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"picks are \[1, 3, 2\] of 4 experts, the reference is \[1, 3, 1\] of 4"):
        changed_share(after, ExpertPicks(before.indices_LTK[..., :1], 4))


def test_two_passes_under_two_weights_differ_in_as_many_picks_as_their_sets_do() -> None:
    packed = packed_batch()
    model = prepared(tiny_qwen3_moe())
    before = recorded(model, packed)[1]
    move_routers(model, 0.05)
    after = recorded(model, packed)[1]
    assert before is not None
    assert after is not None
    differing = sum(
        len(set(new) - set(old))
        for new_layer, old_layer in zip(after.indices_LTK.tolist(), before.indices_LTK.tolist(), strict=True)
        for new, old in zip(new_layer, old_layer, strict=True)
    )
    assert differing > 0
    assert changed_share(after, before) == differing / (NUM_LAYERS * NUM_TOKENS * TOP_K)
