"""The copy that training waits for."""

from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from gspo.model.serving import served_parameters, serving_weights
from gspo.model.serving_layout import ServedParameter, ServedPart, ServingLayout
from gspo_services.learner.weights import build_snapshot, copy_parameters, copy_weights
from gspo_services.learner.weights.snapshot import Snapshot
from tests.support.learner.tiny_model import tiny_qwen3_moe


def test_a_version_is_the_same_whether_parameters_or_tensors_were_copied() -> None:
    model = tiny_qwen3_moe()
    layout = ServingLayout(model)

    def snapshot() -> Snapshot:
        parameters = served_parameters(model, gathered=nullcontext, dtype=torch.bfloat16, layout=layout)
        return build_snapshot(1, copy_parameters(parameters))

    found = [snapshot(), snapshot()]
    expected = build_snapshot(1, copy_weights(serving_weights(model, gathered=nullcontext, dtype=torch.bfloat16)))
    for each in found:
        assert each.manifest == expected.manifest
        assert np.array_equal(each.data, expected.data)


def test_training_waits_for_one_copy_of_each_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_qwen3_moe()
    layout = ServingLayout(model)
    list(served_parameters(model, gathered=nullcontext, layout=layout))
    copies: list[int] = []
    own = torch.Tensor.to

    def counted(tensor: torch.Tensor, *arguments: object, **options: object) -> torch.Tensor:
        copies.append(tensor.numel())
        return own(tensor, *arguments, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(torch.Tensor, "to", counted)
    copied = copy_parameters(served_parameters(model, gathered=nullcontext, layout=layout))
    assert len(copies) == len(list(model.parameters()))
    assert len(copied.tensors) > len(copies)


def test_parameters_may_share_a_buffer_that_is_filled_again_for_the_next_one() -> None:
    def exported() -> Iterator[ServedParameter]:
        buffer = torch.empty(4)
        for value in (1.0, 2.0):
            buffer.fill_(value)
            yield ServedParameter(buffer, [ServedPart(f"{value}.{half}", (2,), 2 * half) for half in (0, 1)])

    assert build_snapshot(1, copy_parameters(exported())).data.tobytes() == np.float32([1] * 4 + [2] * 4).tobytes()


def test_what_is_taken_is_no_longer_there() -> None:
    copied = copy_weights([("w", torch.zeros(2))])
    assert [tensor.name for tensor in copied.take()] == ["w"]
    assert copied.tensors == []
