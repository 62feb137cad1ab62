"""Several adapters in one pass: each sequence is changed by its own alone, and trains its own alone."""

from typing import Any

import numpy as np
import pytest
import torch

from gspo.model.adapter_choice import AdapterChoice
from gspo.model.lora import LoraPlan, adapted_weights, inject_lora, is_lora, lora_name, part_of
from gspo.model.packing import PackedBatch, TrainSequence, pack
from gspo.model.policy import prepare_policy
from tests.support.learner.tiny_model import tiny_qwen3_moe

ONE = LoraPlan(rank=3, alpha=6.0, target_modules=("attention",))
TWO = LoraPlan(rank=3, alpha=6.0, target_modules=("attention",), num_adapters=2)


def prepared(plan: LoraPlan, *, recompute: bool) -> Any:
    model = tiny_qwen3_moe()
    prepare_policy(model, logprob_chunk_tokens=64, activation_checkpointing=recompute)
    inject_lora(model, plan, seed=5)
    return model.train()


def drawn(model: Any) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_lora(name):
                parameter.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(len(name)))


def a_sequence(length: int, adapter: int) -> TrainSequence:
    actions = np.arange(length) > 1
    return TrainSequence(
        token_ids=(np.arange(length) * 13 + length) % 512,
        action_mask=actions,
        behaviour_logprobs=np.zeros(length, dtype=np.float32),
        versions=np.where(actions, 0, -1),
        turn_ids=np.where(actions, 0, -1).astype(np.int32),
        temperature=1.0,
        adapter=adapter,
        advantages=np.zeros(length, dtype=np.float32),
    )


def passed(model: Any, packed: PackedBatch, choice: AdapterChoice | None) -> list[float]:
    """Log-probs of the actions. Backward from their sum."""
    if choice is not None:
        choice.choose(packed.adapters_T, packed.input_ids.shape[1], packed.targets_T.device)
    logprobs = model(
        input_ids=packed.input_ids, position_ids=packed.position_ids, cu_seqlens=packed.cu_seqlens,
        targets_T=packed.targets_T, temperatures_T=packed.temperatures_T,
    ).logprobs_T[packed.mask_T]  # fmt: skip
    logprobs.sum().backward()
    found: list[float] = logprobs.tolist()
    return found


@pytest.mark.parametrize("recompute", [False, True])
def test_each_sequence_has_the_log_probs_and_trains_the_matrices_of_its_own_adapter(recompute: bool) -> None:
    both = prepared(TWO, recompute=recompute)
    drawn(both)
    sequences = [a_sequence(9, 1), a_sequence(6, 0), a_sequence(7, 1)]
    found = passed(both, pack(sequences, policy_version=0), AdapterChoice(both, TWO))
    of_both = {name: value for name, value in both.named_parameters() if is_lora(name)}
    begin = 0
    for sequence in sequences:
        alone = prepared(ONE, recompute=recompute)
        with torch.no_grad():
            for name, value in alone.named_parameters():
                if is_lora(name):
                    value.copy_(part_of(of_both[name], name, sequence.adapter, ONE.rank))
        expected = passed(alone, pack([sequence], policy_version=0), None)
        assert found[begin : begin + len(expected)] == pytest.approx(expected, abs=2e-5)
        begin += len(expected)
        for name, value in alone.named_parameters():
            if is_lora(name):
                # What is left at the end is what no sequence accounts for.
                part_of(of_both[name].grad, name, sequence.adapter, ONE.rank).sub_(value.grad)
    assert begin == len(found)
    for name, value in of_both.items():
        assert value.grad is not None
        assert value.grad.abs().max() < 1e-3, lora_name(name)


def test_without_a_choice_all_sequences_have_the_first_adapter() -> None:
    both = prepared(TWO, recompute=False)
    drawn(both)
    choice = AdapterChoice(both, TWO)
    packed = pack([a_sequence(9, 0), a_sequence(6, 0)], policy_version=0)
    assert packed.adapters_T is None
    passed(both, packed, choice)
    for name, value in both.named_parameters():
        if is_lora(name):
            first, second = (part_of(value.grad, name, place, ONE.rank).abs().max() for place in (0, 1))
            assert (first > 0, second > 0) == (True, False), name


def test_the_first_weights_of_each_are_those_of_one_alone_and_change_nothing() -> None:
    both = prepared(TWO, recompute=False)
    assert {each.scale for each in adapted_weights(both).values()} == {ONE.alpha / ONE.rank}
    for name, value in both.named_parameters():
        if ".lora_B." in name:
            assert not value.any()


def test_adapters_of_experts_cannot_be_told_apart() -> None:
    plan = LoraPlan(rank=3, alpha=6.0, target_modules=("attention", "experts"), num_adapters=2)
    with pytest.raises(ValueError, match="2 adapters of experts cannot be told apart by token"):
        inject_lora(tiny_qwen3_moe(), plan, seed=5)
    with pytest.raises(ValueError, match="adapter is -1; adapters are counted from 0"):
        a_sequence(5, -1)
