"""The load-balancing loss against transformers' own and by hand, and on a batch in any split."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from gspo.model.packing import pack
from gspo.model.policy import prepare_policy
from gspo.moe.load_balance import RouterLogits, load_balancing_loss
from gspo.settings import Objective
from gspo_services.learner.start import parallelism_of, require_supported
from gspo_services.shared.settings.sections import Settings
from tests.support.engines.moe_engine import MoeEngine
from tests.support.learner.tiny_model import TINY_VOCAB_SIZE, tiny_qwen3_moe
from tests.support.learner.trained import train
from tests.support.loss.sequences import random_groups, random_sequence

COEFFICIENT = 0.01


def test_it_is_transformers_own_in_value_and_gradient() -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    generator = torch.Generator().manual_seed(1)
    logits = [torch.randn(13, 6, generator=generator).requires_grad_() for _ in range(3)]
    found, expected = load_balancing_loss(logits, 2), load_balancing_loss_func(tuple(logits), 6, 2)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    for a, b in zip(torch.autograd.grad(found, logits), torch.autograd.grad(expected, logits), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8)


def test_even_use_of_the_experts_is_k_and_one_for_all_is_more() -> None:
    even = torch.tensor([[9.0, 9.0, 0.0, 0.0], [0.0, 0.0, 9.0, 9.0]])
    assert load_balancing_loss([even], 2).item() == pytest.approx(2.0)
    same = torch.tensor([[99.0, 99.0, 0.0, 0.0]] * 2)
    assert load_balancing_loss([same], 2).item() == pytest.approx(4.0)  # 4 experts * (1 * 1/2 + 1 * 1/2)


def test_the_routers_logits_of_a_pass_are_taken_with_their_gradient() -> None:
    model = tiny_qwen3_moe()
    prepare_policy(model, logprob_chunk_tokens=64, activation_checkpointing=True)
    recorder = RouterLogits(model)
    sequence = random_sequence(12, 1, vocab_size=TINY_VOCAB_SIZE)
    packed = pack([sequence.with_advantages(np.zeros(12, dtype=np.float32))], policy_version=1)
    with recorder.recording():
        result = model(
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            cu_seqlens=packed.cu_seqlens,
            targets_T=packed.targets_T,
            temperatures_T=packed.temperatures_T,
        )
    logits = recorder.take()
    assert [tuple(x.shape) for x in logits] == [(12, 4)] * 2
    gates = [model.get_parameter(f"model.layers.{layer}.mlp.gate.weight") for layer in range(2)]
    loss = load_balancing_loss(logits, recorder.top_k) + 0.0 * result.logprobs_T.sum()
    assert all(gradient.abs().max() > 1e-6 for gradient in torch.autograd.grad(loss, gates))
    with pytest.raises(ValueError, match="0 of 2 routers returned logits"):
        recorder.take()


def gate_gradients(
    coefficient: float, max_tokens_per_micro_batch: int, groups: list[Any], *, rank: int = 0, world_size: int = 1
) -> tuple[list[torch.Tensor], dict[str, float]]:
    """Of one rank in one optimizer step with no advantage anywhere, so that only the auxiliary loss is left."""
    gradients: list[torch.Tensor] = []

    def keep(model: Any) -> None:
        for layer in range(2):
            gradient = model.get_parameter(f"model.layers.{layer}.mlp.gate.weight").grad
            gradients.append(torch.zeros(1) if gradient is None else gradient.clone())

    engine = MoeEngine(
        tiny_qwen3_moe(),
        max_tokens_per_micro_batch=max_tokens_per_micro_batch,
        update=keep,
        load_balance_coefficient=coefficient,
    )
    engine.rank, engine.world_size = rank, world_size
    objective = Objective(eps_low=0.1, eps_high=0.19, anchor="behaviour", tis_mode="off")
    metrics = train(engine, groups, objective).metrics
    return gradients, metrics


def test_a_step_adds_the_mean_over_its_tokens_of_its_micro_batches_losses() -> None:
    drawn = random_groups(2, 3, seed=4, vocab_size=TINY_VOCAB_SIZE)
    groups = [replace(group, rewards=np.zeros(3)) for group in drawn]
    whole, metrics = gate_gradients(COEFFICIENT, 10_000, groups)
    without, plain = gate_gradients(0.0, 10_000, groups)
    assert metrics["load_balancing_loss"] == pytest.approx(metrics["loss"], rel=1e-5)
    assert COEFFICIENT * 1.9 < metrics["load_balancing_loss"] < COEFFICIENT * 4
    assert "load_balancing_loss" not in plain
    assert max(g.abs().max().item() for g in without) == 0.0
    assert min(g.abs().max().item() for g in whole) > 1e-8

    # Of one rank or two, each sequence a micro-batch by itself.
    members = [sequence for group in groups for sequence in group.sequences][:3]
    of_each = [
        gate_gradients(COEFFICIENT, 10_000, [replace(groups[0], sequences=(each,), rewards=np.zeros(1), turn_rewards=None)])
        for each in members
    ]
    num_tokens = sum(each.num_tokens for each in members)
    assert len({each.num_tokens for each in members}) == 3
    step = [replace(groups[0], sequences=tuple(members), rewards=np.zeros(3), turn_rewards=None)]
    for world_size in (1, 2):
        ranks = [gate_gradients(COEFFICIENT, 1, step, rank=rank, world_size=world_size)[0] for rank in range(world_size)]
        for layer in range(2):
            found = sum(rank[layer] for rank in ranks)
            expected = sum(own[layer] * (m.num_tokens / num_tokens) for (own, _), m in zip(of_each, members, strict=True))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-9)


def test_a_dense_model_is_refused_with_the_way_out() -> None:
    rest: dict[str, Any] = {"num_ranks": 2, "routing_replay": False, "load_balance": True}
    with pytest.raises(ValueError, match=r"a qwen3 model has no routers.*set objective\.load_balance_coefficient = 0"):
        require_supported(parallelism_of({"model_type": "qwen3"}, expert_parallel=1, **rest))
    moe = {"model_type": "qwen3_moe", "num_experts": 4}
    require_supported(parallelism_of(moe, expert_parallel=2, **rest))
    with pytest.raises(ValueError, match="load_balance_coefficient"):
        Settings.model_validate({"objective": {"load_balance_coefficient": -0.1}})


def test_logits_of_different_shapes_and_models_without_routers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"router_logits have shapes \[\]"):
        load_balancing_loss([], 2)
    with pytest.raises(ValueError, match=r"shapes \[\(3, 4\), \(2, 4\)\]"):
        load_balancing_loss([torch.zeros(3, 4), torch.zeros(2, 4)], 2)
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, head_dim=8)
    with pytest.raises(ValueError, match="Qwen3ForCausalLM has no routers"):
        RouterLogits(Qwen3ForCausalLM(config))
