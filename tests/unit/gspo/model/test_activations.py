"""MLPs in tiles and checkpoints in the host's memory: the same numbers, with less kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gspo.model import activations
from gspo.model.packing import pack
from gspo.model.policy import prepare_policy
from gspo_services.shared.settings.sections import Learner
from tests.support.loss.sequences import random_sequence
from tests.support.policy.architectures import tiny_model


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def gradients_of(model: Any, lengths: tuple[int, ...]) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients of a step, and the bytes of the largest tensor that autograd kept, weights aside."""
    sequences = [random_sequence(length, length, vocab_size=64) for length in lengths]
    packed = pack([each.with_advantages(np.zeros(each.num_tokens, np.float32)) for each in sequences], policy_version=0)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    sizes = [0]

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            sizes.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = model(
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            cu_seqlens=packed.cu_seqlens,
            targets_T=packed.targets_T,
            temperatures_T=packed.temperatures_T,
        )
    result.logprobs_T.sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}, max(sizes)


def prepared(**options: Any) -> Any:
    model = tiny_model("Qwen3, window", intermediate_size=512)
    prepare_policy(model, logprob_chunk_tokens=1000, **options)
    return model


@pytest.mark.parametrize("lengths", [(40, 24), (3,)])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_tiles_have_the_gradients_of_whole_rows(lengths: tuple[int, ...], checkpointing: bool) -> None:
    expected, at_once = gradients_of(prepared(), lengths)
    found, tiled = gradients_of(prepared(mlp_tiles=4, activation_checkpointing=checkpointing), lengths)
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm(), name
    # An MLP's hidden values are the largest tensors of a whole row.
    assert tiled <= at_once / 4


def test_checkpoints_go_to_the_host_once_a_layer_and_change_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = gradients_of(prepared(activation_checkpointing=True), (40, 24))
    kept = []

    def copied(states: torch.Tensor) -> torch.Tensor:
        kept.append(states.shape)
        return states.clone()

    monkeypatch.setattr(activations, "on_host", copied)
    found, _ = gradients_of(prepared(activation_checkpointing=True, checkpoints_on_host=True), (40, 24))
    assert kept == [(1, 64, 32)] * 4
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_tiles_need_a_dense_mlp_and_offload_needs_checkpoints() -> None:
    with pytest.raises(ValueError, match="mlp_tiles is 2 and GptOssForCausalLM has no gated MLP to tile; use mlp_tiles = 1"):
        prepare_policy(tiny_model("gpt-oss"), logprob_chunk_tokens=8, mlp_tiles=2)
    with pytest.raises(ValueError, match=r"activation_offload is true .*; set activation_checkpointing = true"):
        Learner(activation_offload=True)
