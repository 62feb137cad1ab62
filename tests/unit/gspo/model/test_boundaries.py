"""Boundaries of segments: what layers make of them is made once a pass, and the device is never waited for."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gspo.model import attention
from gspo.model.boundaries import Boundaries
from gspo.model.policy import prepare_policy
from tests.support.policy.architectures import tiny_model

ENDS = (0, 3, 4, 9)
CPU = torch.device("cpu")


class Operations(TorchDispatchMode):
    """Counts operations by their name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_boundaries_are_the_numbers_that_they_were_made_of() -> None:
    boundaries = Boundaries(ENDS)
    assert (list(boundaries), len(boundaries), boundaries[-1], boundaries[1:3]) == (list(ENDS), 4, 9, (3, 4))
    assert boundaries.longest == 5
    assert Boundaries.of(boundaries) is boundaries
    assert list(Boundaries.of(ENDS)) == list(ENDS)


def test_a_tensor_of_them_is_made_once() -> None:
    boundaries = Boundaries(ENDS)
    assert boundaries.on(CPU).tolist() == list(ENDS)
    assert boundaries.on(CPU).dtype == torch.int32
    assert boundaries.on(CPU) is boundaries.on(CPU)
    assert boundaries.on(CPU, torch.int64) is not boundaries.on(CPU)


def test_every_token_has_a_place_in_the_rows_and_comes_back_from_it() -> None:
    rows = Boundaries(ENDS).rows(CPU)
    assert rows.is_token_SL.sum(1).tolist() == [3, 1, 5]
    assert rows.places_SL[rows.is_token_SL].tolist() == list(range(9))
    assert (rows.places_SL[~rows.is_token_SL] == 8).all()
    assert rows.places_SL.flatten()[rows.slots_T].tolist() == list(range(9))


def test_variable_length_attention_gets_one_tensor_of_boundaries_in_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[int, int]] = []

    def kernel(query: Any, key: Any, value: Any, begins: Any, ends: Any, *lengths: int, **_options: Any) -> Any:
        assert lengths == (5, 5)
        found.extend([(id(begins), begins.data_ptr()), (id(ends), ends.data_ptr())])
        return query

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    boundaries, states = Boundaries(ENDS), torch.zeros(1, 2, 9, 4)
    for _layer in range(3):
        attention._flash(states, states, states, boundaries, None, None)
    assert len(found) == 6
    assert len(set(found)) == 1


def test_values_that_are_narrower_than_keys_get_the_width_that_the_kernel_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in latent attention."""

    def kernel(query: Any, key: Any, value: Any, *_rest: Any, **_options: Any) -> Any:
        assert value.shape == key.shape
        return value

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    states, values = torch.zeros(1, 2, 9, 4), torch.rand(1, 2, 9, 3)
    output = attention._flash(states, states, values, Boundaries(ENDS), None, None)
    assert torch.equal(output, values.transpose(1, 2))


def counted(num_linear: int) -> Counter[str]:
    """The operations of a forward pass of a model with so many layers of linear attention and one of full attention."""
    torch.set_num_threads(1)
    kinds = ["linear_attention"] * num_linear + ["full_attention"]
    model = tiny_model("Qwen3.5", layer_types=kinds, num_hidden_layers=len(kinds))
    prepare_policy(model, logprob_chunk_tokens=1000)
    tokens = torch.arange(9)
    with torch.no_grad(), Operations() as operations:
        model(
            input_ids=tokens[None],
            position_ids=tokens[None],
            cu_seqlens=Boundaries(ENDS),
            targets_T=tokens,
            temperatures_T=torch.ones(9),
        )
    return operations.counts


def test_no_layer_copies_boundaries_to_the_device_and_none_asks_it_how_many_tokens_there_are() -> None:
    few, many = counted(1), counted(3)
    assert many["lift_fresh"] == few["lift_fresh"], "a tensor of the host's numbers, which the device waits for"
    for reading in ("nonzero", "_local_scalar_dense"):
        assert many[reading] == few[reading], reading
