"""The copy that training waits for."""

from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from gspo.model.serving import served_parameters, serving_weights
from gspo.model.serving_layout import ServedParameter, ServedPart, ServingLayout
from gspo_protocol.digests import tensor_digest
from gspo_protocol.tiles import TILE_BYTES
from gspo_services.learner.weights import build_snapshot, copy_parameters, copy_weights
from gspo_services.learner.weights.snapshot import Snapshot
from tests.support.learner.tiny_model import tiny_qwen3_moe
from tests.support.wire.snapshots import bytes_of


def test_a_version_is_the_same_whether_parameters_or_tensors_were_copied() -> None:
    model = tiny_qwen3_moe()
    layout = ServingLayout(model)

    def snapshot() -> Snapshot:
        parameters = served_parameters(model, gathered=nullcontext, dtype=torch.bfloat16, layout=layout)
        return build_snapshot(1, copy_parameters(parameters))

    found = [snapshot(), snapshot()]
    expected = build_snapshot(1, copy_weights(serving_weights(model, gathered=nullcontext, dtype=torch.bfloat16)))
    for each in found:
        assert each.manifest.digest == expected.manifest.digest
        assert by_name(each) == by_name(expected)


def by_name(snapshot: Snapshot) -> dict[str, tuple[str, list[int], bytes]]:
    tensors = zip(snapshot.manifest.tensors, snapshot.tensor_data(), strict=True)
    return {info.name: (info.dtype, info.shape, bytes(data)) for info, data in tensors}


def test_training_waits_for_one_copy_of_each_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_qwen3_moe()
    layout = ServingLayout(model)
    list(served_parameters(model, gathered=nullcontext, layout=layout))
    copies: list[int] = []
    own = torch.Tensor.copy_

    def counted(tensor: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        copies.append(tensor.numel())
        return own(tensor, source, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    copied = copy_parameters(served_parameters(model, gathered=nullcontext, layout=layout))
    assert len(copies) == len(copied.pieces) == len(list(model.parameters()))
    assert len(copied.tensors()) > len(copies)


def test_parameters_may_share_a_buffer_that_is_filled_again_for_the_next_one() -> None:
    def exported() -> Iterator[ServedParameter]:
        buffer = torch.empty(4)
        for value in (1.0, 2.0):
            buffer.fill_(value)
            yield ServedParameter(buffer, [ServedPart(f"{value}.{half}", (2,), 2 * half) for half in (0, 1)])

    assert bytes_of(build_snapshot(1, copy_parameters(exported()))) == np.float32([1] * 4 + [2] * 4).tobytes()


def test_tensors_lie_in_a_piece_as_in_their_parameter_and_alone_where_they_do_not_follow_one_another() -> None:
    values = torch.arange(6, dtype=torch.float32)
    ordered = ServedParameter(values, [ServedPart("b", (2,), 2), ServedPart("a", (2,), 0), ServedPart("c", (2,), 4)])
    with_a_gap = ServedParameter(values, [ServedPart("d", (2,), 0), ServedPart("e", (2,), 4)])
    twice = ServedParameter(values, [ServedPart("f", (4,), 0), ServedPart("g", (4,), 2)])
    copied = copy_parameters([ordered, with_a_gap, twice])
    assert [each.name for each in copied.layout.tensors] == ["a", "b", "c", "d", "e", "f", "g"]
    assert [len(piece.data) // 4 for piece in copied.pieces] == [6, 2, 2, 4, 4]
    expected = [0, 1, 2, 3, 4, 5, 0, 1, 4, 5, 0, 1, 2, 3, 2, 3, 4, 5]
    assert bytes_of(build_snapshot(1, copied)) == np.float32(expected).tobytes()


@pytest.mark.parametrize("sizes", [(2 * TILE_BYTES, TILE_BYTES, 6), (6, TILE_BYTES)])
def test_digests_of_tensors_in_one_piece_are_their_own(sizes: tuple[int, ...]) -> None:
    """Whether or not their tiles are the piece's."""
    values, start, parts = torch.randn(sum(sizes) // 2).bfloat16(), 0, []
    for size in sizes:
        parts.append(ServedPart(f"{start}", (size // 2,), start))
        start += size // 2
    found = copy_parameters([ServedParameter(values, parts)]).tensors()
    data = values.view(torch.uint8).numpy()
    assert [each.digest for each in found] == [
        tensor_digest(data[each.offset : each.offset + each.num_bytes].tobytes()) for each in found
    ]
