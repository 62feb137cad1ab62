"""Serving tensors as ranges of whole parameters."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gspo.model import serving_layout
from gspo.model.serving import served_parameters, serving_weights
from gspo.model.serving_layout import ServingLayout
from tests.support.learner.tiny_model import tiny_qwen3_moe, tiny_tied_model

Conversion = Any


@pytest.mark.parametrize("build", [tiny_qwen3_moe, tiny_tied_model])
def test_every_export_has_the_weights_of_its_moment_in_the_same_order(build: Any) -> None:
    model = build()
    layout = ServingLayout(model)
    for _ in range(3):
        served = {name: tensor.clone() for name, tensor in serving_weights(model, gathered=nullcontext, layout=layout)}
        expected = {name: tensor.clone() for name, tensor in serving_weights(model, gathered=nullcontext)}
        assert list(served) == list(expected)
        assert all(torch.equal(served[name], expected[name]) for name in expected)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))


def test_an_export_after_the_first_yields_each_parameter_once() -> None:
    model = tiny_qwen3_moe()
    layout = ServingLayout(model)
    first = list(served_parameters(model, gathered=nullcontext, layout=layout))
    second = list(served_parameters(model, gathered=nullcontext, layout=layout))
    assert len(second) == len(list(model.parameters())) < len(first)
    assert sum(len(parameter.parts) for parameter in second) == len(first)


def converted(conversion: Conversion, monkeypatch: pytest.MonkeyPatch) -> ServingLayout:
    monkeypatch.setattr(serving_layout, "serving_tensors", conversion)
    return ServingLayout(nn.Module())


def pairs(layout: ServingLayout, whole: Tensor) -> list[tuple[str, Tensor]]:
    return [(name, tensor.clone()) for parameter in layout.served("p", whole) for name, tensor in parameter.tensors()]


def halves(_: Any, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    for index, half in enumerate(tensor.chunk(2, dim=0)):
        yield f"{name}.{index}", half


def squeezed(_: Any, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    for index, row in enumerate(tensor.unbind(0)):
        yield f"{name}.{index}", row.squeeze()


def transposed(_: Any, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield name, tensor.t()


def columns(_: Any, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    for index, part in enumerate(tensor.chunk(2, dim=-1)):
        yield f"{name}.{index}", part


def backwards(_: Any, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    for index, half in enumerate(reversed(tensor.chunk(2, dim=0))):
        yield f"{name}.{index}", half


def other_when_wide(_: Any, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Treats what has more than two columns differently: what is seen of rows of two is wrong."""
    yield from (halves if tensor.shape[-1] <= 2 else backwards)(_, name, tensor)


def negated(_: Any, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield name, tensor * (1.0 if not tensor.is_floating_point() else -1.0)


@pytest.mark.parametrize(
    ("conversion", "num_copies"),
    [(halves, 1), (squeezed, 1), (backwards, 1), (transposed, 1), (columns, 2), (other_when_wide, 2), (negated, 1)],
)
@pytest.mark.parametrize("shape", [(4, 3), (4, 2), (4, 5), (2, 6)])
def test_any_conversion_is_followed(
    conversion: Conversion, num_copies: int, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = converted(conversion, monkeypatch)
    for _ in range(2):
        whole = torch.randn(shape)
        expected = list(conversion(None, "p", whole))
        found = pairs(layout, whole)
        assert [name for name, _ in found] == [name for name, _ in expected]
        assert all(torch.equal(tensor, other) for (_, tensor), (_, other) in zip(found, expected, strict=True))
    assert len(list(layout.served("p", whole))) <= max(num_copies, 1 if shape[-1] > 2 else 2)


@pytest.mark.parametrize("shape", [(), (1,), (5,)])
def test_scalars_and_vectors_are_served_whole(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    layout = converted(lambda _, name, tensor: iter([(name, tensor)]), monkeypatch)
    for _ in range(2):
        whole = torch.randn(shape)
        ((name, tensor),) = pairs(layout, whole)
        assert (name, tensor.shape) == ("p", shape)
        assert torch.equal(tensor, whole)


def test_two_parameters_under_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = converted(lambda _, name, tensor: iter([("same", tensor)]), monkeypatch)
    pairs(layout, torch.zeros(2))
    with pytest.raises(ValueError, match="p and q are both served as same"):
        list(layout.served("q", torch.zeros(2)))
