"""A Hugging Face model on packed sequences against the same model on padded ones; its weights as they are served."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from gspo.model.attention import segment_attention
from gspo.model.packing import PackedBatch, TrainSequence, pack
from gspo.model.policy import load_policy, prepare_policy, restore_rotary_frequencies
from gspo.model.serving import serving_weights
from tests.support.learner.tiny_model import TINY_VOCAB_SIZE, tiny_qwen3_moe, tiny_tied_model
from tests.support.loss.sequences import random_sequence
from tests.support.policy.families import family_config

LENGTHS = (3, 30, 11, 24)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def random_sequences() -> list[TrainSequence]:
    sequences = [
        random_sequence(length, seed, vocab_size=TINY_VOCAB_SIZE, temperature=0.5 + seed / 4)
        for seed, length in enumerate(LENGTHS)
    ]
    return [sequence.with_advantages(np.zeros(sequence.num_tokens, dtype=np.float32)) for sequence in sequences]


def packed_forward(model: Any, packed: PackedBatch, **options: bool) -> Any:
    return model(
        input_ids=packed.input_ids,
        position_ids=packed.position_ids,
        cu_seqlens=packed.cu_seqlens,
        targets_T=packed.targets_T,
        temperatures_T=packed.temperatures_T,
        **options,
    )


def padded_logprobs(model: Any, sequences: list[TrainSequence]) -> list[Tensor]:
    """Return log-probs of each sequence's tokens 1 .. L - 1, from transformers' own forward on right-padded rows."""
    longest = max(LENGTHS)
    input_ids = torch.full((len(sequences), longest), 5)
    attention_mask = torch.zeros(len(sequences), longest, dtype=torch.long)
    for row, sequence in enumerate(sequences):
        input_ids[row, : sequence.num_tokens] = torch.from_numpy(sequence.token_ids)
        attention_mask[row, : sequence.num_tokens] = 1
    logits = model(input_ids=input_ids, attention_mask=attention_mask).logits.float()
    result = []
    for row, sequence in enumerate(sequences):
        scaled = torch.log_softmax(logits[row, : sequence.num_tokens - 1] / sequence.temperature, dim=-1)
        result.append(scaled.gather(-1, torch.from_numpy(sequence.token_ids[1:, None])).squeeze(-1))
    return result


@pytest.mark.parametrize("build", [tiny_qwen3_moe, tiny_tied_model])
@pytest.mark.parametrize("activation_checkpointing", [False, True])
def test_packed_logprobs_and_gradients_equal_padded_ones(build: Any, activation_checkpointing: bool) -> None:
    sequences = random_sequences()
    packed = pack(sequences, policy_version=0)
    has_target = torch.ones(packed.targets_T.shape[0], dtype=torch.bool)
    has_target[torch.tensor(packed.cu_seqlens[1:]) - 1] = False
    weights = torch.randn(int(has_target.sum()), generator=torch.Generator().manual_seed(1))

    reference = build()
    expected = torch.cat(padded_logprobs(reference, sequences))
    (expected * weights).sum().backward()

    model = build()
    prepare_policy(model, logprob_chunk_tokens=7, activation_checkpointing=activation_checkpointing)
    result = packed_forward(model, packed, with_entropy=True)
    (result.logprobs_T[has_target] * weights).sum().backward()

    torch.testing.assert_close(result.logprobs_T[has_target], expected, rtol=1e-4, atol=1e-4)
    names = [name for name, _ in reference.named_parameters()]
    assert [name for name, _ in model.named_parameters()] == names
    for name, parameter in model.named_parameters():
        gradient = reference.get_parameter(name).grad
        assert parameter.grad is not None, name
        assert (parameter.grad - gradient).norm() <= 1e-4 * gradient.norm(), name


def test_a_sequence_has_the_same_logprobs_alone_and_in_company() -> None:
    model = tiny_tied_model()
    prepare_policy(model, logprob_chunk_tokens=1000)
    sequences = random_sequences()
    with torch.no_grad():
        together = packed_forward(model, pack(sequences, policy_version=0)).logprobs_T
        alone = packed_forward(model, pack(sequences[1:2], policy_version=0)).logprobs_T
    start, end = sum(LENGTHS[:1]), sum(LENGTHS[:2])
    torch.testing.assert_close(together[start:end], alone, rtol=0, atol=2e-6)


def test_attention_refuses_what_it_would_compute_wrongly() -> None:
    heads = torch.zeros(1, 2, 6, 4)
    module = torch.nn.Identity()
    with pytest.raises(ValueError, match="attention_mask"):
        segment_attention(module, heads, heads, heads, torch.ones(6, 6), cu_seqlens=(0, 6))
    with pytest.raises(ValueError, match="ends at 5, the packed row has 6"):
        segment_attention(module, heads, heads, heads, None, cu_seqlens=(0, 5))


def test_a_model_with_other_layers_or_transformed_logits_is_refused() -> None:
    model = tiny_tied_model()
    model.config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(
        ValueError, match=r"layers of type \['chunked_attention'\]; only full_attention, linear_attention, sl"
    ):
        prepare_policy(model, logprob_chunk_tokens=8)
    model = tiny_tied_model()
    model.config.num_kv_shared_layers = 2
    with pytest.raises(ValueError, match=r"has 2 layers that take their keys from others"):
        prepare_policy(model, logprob_chunk_tokens=8)
    model = tiny_tied_model()
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match=r"final_logit_softcapping = 30\.0"):
        prepare_policy(model, logprob_chunk_tokens=8)


class Mixer(torch.nn.Module):
    """As in Mamba's layers."""

    def __init__(self, *, convolves: bool) -> None:
        super().__init__()
        if convolves:
            self.conv1d = torch.nn.Conv1d(4, 4, 2, groups=4, padding=1)
        else:
            self.A_log = torch.nn.Parameter(torch.zeros(4))


@pytest.mark.parametrize("convolves", [True, False])
def test_a_layer_with_a_state_of_another_kind_is_refused_by_name(convolves: bool) -> None:
    model = tiny_tied_model()
    model.model.layers[0].mixer = Mixer(convolves=convolves)
    with pytest.raises(ValueError, match=r"model.layers.0.mixer \(Mixer\) carries a state from token to token"):
        prepare_policy(model, logprob_chunk_tokens=8)


def test_a_state_in_layers_that_nothing_shows_is_refused_by_what_the_configuration_says() -> None:
    model = tiny_tied_model()
    model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(ValueError, match="has 1 layers of linear_attention, and 0 are known as such"):
        prepare_policy(model, logprob_chunk_tokens=8)


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        load_policy(tmp_path, torch.float32)


@pytest.mark.parametrize("build", [tiny_qwen3_moe, tiny_tied_model])
def test_served_weights_are_bit_equal_to_what_save_pretrained_writes(build: Any, tmp_path: Path) -> None:
    build().save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    built, loaded = build(), load_policy(tmp_path, torch.float32)
    for model in (built, loaded):
        prepare_policy(model, logprob_chunk_tokens=8)
        served = {name: tensor.clone() for name, tensor in serving_weights(model, gathered=nullcontext)}
        assert set(served) == set(expected)
        assert all(torch.equal(served[name], expected[name]) for name in expected)


def test_experts_are_served_one_by_one_and_cast_on_request() -> None:
    model = tiny_qwen3_moe()
    served = dict(serving_weights(model, gathered=nullcontext, dtype=torch.bfloat16))
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    slab = model.get_parameter("model.layers.1.mlp.experts.gate_up_proj")
    assert torch.equal(served[name], slab[3, slab.shape[1] // 2 :].bfloat16())
    assert served[name].is_contiguous()


def test_a_rank_that_is_given_nothing_still_gathers_every_parameter() -> None:
    model = tiny_qwen3_moe()
    gathered = []

    @contextmanager
    def record(value: Tensor) -> Iterator[None]:
        gathered.append(value)
        yield

    assert list(serving_weights(model, gathered=record, emit=False)) == []
    assert len(gathered) == len(list(model.parameters()))


def test_norms_of_latent_attention_have_the_epsilon_that_engines_take() -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**family_config("glm4_moe_lite"), rms_norm_eps=1e-3))
    prepare_policy(model, logprob_chunk_tokens=7)
    assert {norm.variance_epsilon for name, norm in model.named_modules() if name.endswith("norm")} == {1e-3}


def test_rounded_rotary_frequencies_are_made_exact_again() -> None:
    model = tiny_qwen3_moe()
    rotary = model.model.rotary_emb
    expected = rotary.inv_freq.clone()
    # As in a model made inside DeepSpeed's zero.Init.
    rotary.to(torch.bfloat16)
    assert not torch.equal(rotary.inv_freq.float(), expected)
    restore_rotary_frequencies(model)
    assert rotary.inv_freq.dtype == torch.float32
    assert torch.equal(rotary.inv_freq, expected)
    assert torch.equal(rotary.original_inv_freq, expected)
