"""Adapters on a model in one process: what is adapted, what is served, what is refused."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo.model.lora import LoraPlan, adapted_weights, inject_lora, is_lora, merged
from gspo.model.serving import lora_weights, serving_weights
from tests.support.learner.tiny_model import tiny_qwen3_moe

BOTH = LoraPlan(rank=3, alpha=6.0, target_modules=("attention", "experts"))
IDS = torch.arange(24)[None] * 7 % 512


def adapted_model(plan: LoraPlan = BOTH, model: Any = None) -> Any:
    """A model whose adapters change it."""
    model = tiny_qwen3_moe() if model is None else model
    inject_lora(model, plan, seed=5)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(0.0, 0.1, generator=generator)
    return model


def served(model: Any, **options: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in serving_weights(model, gathered=nullcontext, **options)}


def dense_model() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


def test_new_adapters_change_nothing_and_alone_are_trained() -> None:
    model = tiny_qwen3_moe()
    inject_lora(model, BOTH, seed=5)
    before = served(tiny_qwen3_moe())
    assert {name: tensor.tolist() for name, tensor in served(model).items()} == {n: t.tolist() for n, t in before.items()}
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if is_lora(name)}
    assert len(trained) == 2 * 2 * (4 + 2), "A and B of four projections and two stacks, in two layers"


def test_adapters_begin_alike_on_every_rank_and_leave_other_random_numbers_alone() -> None:
    first, second, other = tiny_qwen3_moe(), tiny_qwen3_moe(), tiny_qwen3_moe()
    torch.manual_seed(1)
    inject_lora(first, BOTH, seed=5)
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), after)
    inject_lora(second, BOTH, seed=5)
    inject_lora(other, BOTH, seed=6)
    matrices = [dict(lora_weights(model, gathered=nullcontext)) for model in (first, second, other)]
    assert all(torch.equal(tensor, matrices[1][name]) for name, tensor in matrices[0].items())
    assert any(not torch.equal(tensor, matrices[2][name]) for name, tensor in matrices[0].items())


@pytest.mark.parametrize(
    ("plan", "make"),
    [
        (BOTH, tiny_qwen3_moe),
        (LoraPlan(rank=2, alpha=1.0, target_modules=("experts",)), tiny_qwen3_moe),
        (LoraPlan(rank=8, alpha=16.0, target_modules=("mlp", "attention")), dense_model),
    ],
)
def test_served_weights_compute_what_the_model_with_its_adapters_does(plan: LoraPlan, make: Any) -> None:
    torch.manual_seed(0)
    plain = make()
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    model = adapted_model(plan, plain)
    again = make()
    again.load_state_dict(state)
    with torch.no_grad():
        before, with_adapters = again(IDS).logits, model(IDS).logits
        parameters = dict(again.named_parameters())
        for name, weight in adapted_weights(model).items():
            parameters[name].copy_(merged(parameters[name], weight, weight.lora_a, weight.lora_b))
        assert (again(IDS).logits - with_adapters).abs().max() < 2e-5
    assert (before - with_adapters).abs().max() > 0.05
    expected = served(again)
    found = served(model)
    assert list(found) == list(expected), "a version's digest depends on the order"
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_merged_weights_are_those_that_peft_computes() -> None:
    model = adapted_model()
    weights = adapted_weights(model)
    modules = dict(model.named_modules())
    assert len(weights) == 2 * (4 + 2)
    for name, weight in weights.items():
        module: Any = modules[weight.name]
        base = module.get_base_layer()
        value = getattr(base, name.rpartition(".")[2])
        own = merged(value, weight, weight.lora_a, weight.lora_b)
        expected = value + module.get_delta_weight("default")
        assert (own - expected).abs().max() < 1e-6 < (own - value).abs().max(), name


def test_the_weights_below_the_adapters_are_those_of_before() -> None:
    before = served(tiny_qwen3_moe())
    found = served(adapted_model(), with_adapters=False)
    assert list(found) == list(before)
    assert all(torch.equal(found[name], before[name]) for name in before)


def test_a_change_below_a_weights_precision_is_rounded_once() -> None:
    # In bfloat16 1 + 0.006 is 1.0078125; if the change were rounded on its way, or the sum twice, it would be 1.
    weight = adapted_weights(adapted_model(LoraPlan(rank=1, alpha=1.0, target_modules=("attention",))))
    adapted = weight["model.layers.0.self_attn.q_proj.weight"]
    change = torch.tensor([[0.006]])
    found = merged(torch.ones(1, 1, dtype=torch.bfloat16), adapted, change, torch.ones(1, 1))
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(1.006, abs=1e-6)


@pytest.mark.parametrize(
    ("make", "targets", "message"),
    [
        (dense_model, ("attention", "experts"), "'experts', and Qwen3ForCausalLM has no such .* it has: attention, mlp"),
        (tiny_qwen3_moe, ("mlp",), "'mlp', and Qwen3MoeForCausalLM has no such .* it has: attention, experts"),
        (tiny_qwen3_moe, ("router",), "'router', .* it has: attention, experts"),
    ],
)
def test_a_target_that_matches_nothing_is_refused_with_those_that_do(
    make: Any, targets: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        inject_lora(make(), LoraPlan(rank=2, alpha=1.0, target_modules=targets), seed=0)


def test_a_model_that_has_some_projections_only_is_refused() -> None:
    model = tiny_qwen3_moe()
    for layer in model.model.layers:
        layer.self_attn.qk_proj = layer.self_attn.q_proj
        del layer.self_attn.q_proj
    with pytest.raises(ValueError, match="'attention'"):
        inject_lora(model, LoraPlan(rank=2, alpha=1.0, target_modules=("attention",)), seed=0)
