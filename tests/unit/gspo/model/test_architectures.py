"""Architectures with more than full attention: packed, against transformers' own forward of each sequence."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from gspo.model import scored_attention
from gspo.model.packing import TrainSequence, pack
from gspo.model.policy import prepare_policy
from gspo.model.serving import serving_weights
from tests.support.loss.sequences import random_sequence
from tests.support.policy.architectures import ARCHITECTURES, tiny_model

LENGTHS = (3, 30, 11, 24)


@pytest.fixture(autouse=True)
def _several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    # A block of queries is then one window, or four tokens where there is none: sequences have several.
    monkeypatch.setattr(scored_attention, "WINDOW_BLOCK", 4)


def sequences() -> list[TrainSequence]:
    found = [random_sequence(length, seed, vocab_size=64, temperature=0.5 + seed / 4) for seed, length in enumerate(LENGTHS)]
    return [each.with_advantages(np.zeros(each.num_tokens, np.float32)) for each in found]


def alone(model: Any, sequence: TrainSequence) -> Tensor:
    """Log-probs of tokens 1 .. L - 1 by transformers' eager forward."""
    logits = model(input_ids=torch.from_numpy(sequence.token_ids)[None]).logits[0, :-1].float()
    chosen = torch.from_numpy(sequence.token_ids[1:, None])
    return (logits / sequence.temperature).log_softmax(dim=-1).gather(-1, chosen).squeeze(-1)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_served_weights_are_those_that_save_pretrained_writes(name: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    model.save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    prepare_policy(model, logprob_chunk_tokens=8)
    served = {served_name: tensor.clone() for served_name, tensor in serving_weights(model, gathered=nullcontext)}
    assert set(served) == set(expected)
    assert all(torch.equal(served[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_logprobs_and_gradients_equal_those_of_transformers(name: str) -> None:
    members = sequences()
    packed = pack(members, policy_version=0)
    has_target = torch.ones(packed.targets_T.shape[0], dtype=torch.bool)
    has_target[torch.tensor(packed.cu_seqlens[1:]) - 1] = False
    weights = torch.randn(int(has_target.sum()), generator=torch.Generator().manual_seed(1))

    reference = tiny_model(name)
    reference.set_attn_implementation("eager")
    expected = torch.cat([alone(reference, member) for member in members])
    (expected * weights).sum().backward()

    model = tiny_model(name)
    prepare_policy(model, logprob_chunk_tokens=7, activation_checkpointing=True)
    result = model(
        input_ids=packed.input_ids,
        position_ids=packed.position_ids,
        cu_seqlens=packed.cu_seqlens,
        targets_T=packed.targets_T,
        temperatures_T=packed.temperatures_T,
    )
    (result.logprobs_T[has_target] * weights).sum().backward()

    torch.testing.assert_close(result.logprobs_T[has_target], expected, rtol=0, atol=1e-5)
    for parameter_name, parameter in model.named_parameters():
        gradient = reference.get_parameter(parameter_name).grad
        if gradient is None:
            assert parameter.grad is None, parameter_name
            continue
        # A decay's gradient is a sum over all steps of the recurrence, in another order for several rows: how far the two
        # are apart depends on the processor (1e-5 to 4e-5).
        tolerance = 1e-4 if parameter_name.endswith(("A_log", "dt_bias")) else 1e-5
        assert (parameter.grad - gradient).norm() <= tolerance * gradient.norm() + 1e-9, parameter_name
