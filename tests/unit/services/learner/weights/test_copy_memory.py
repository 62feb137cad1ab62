"""Memory of copies is used again, once nobody reads it."""

import torch

from gspo_services.learner.weights.copy_memory import CopyMemory
from gspo_services.learner.weights.weight_copy import copy_weights


def test_memory_is_used_again_when_nobody_reads_it_any_more() -> None:
    memory = CopyMemory()
    memory.keep_for(1000)
    filled, first = memory.take(1000, pinned=False)
    address = first.ctypes.data
    filled.fill_(7)
    # What a message that still waits to be sent holds.
    frame = memoryview(first[100:200])
    del first
    _, other = memory.take(1000, pinned=False)
    other_address = other.ctypes.data
    assert other_address != address
    assert bytes(frame) == bytes([7] * 100)
    del frame
    assert memory.take(1000, pinned=False)[1].ctypes.data == address


def test_no_more_is_kept_than_a_version_has() -> None:
    memory = CopyMemory()
    memory.keep_for(1000)
    lent = [memory.take(600, pinned=False)[1] for _ in range(3)]
    lent.clear()
    assert memory._spare_bytes == 600
    assert memory.take(601, pinned=False)[1].nbytes == 601
    assert memory._spare_bytes == 600
    memory.take(600, pinned=False)


def test_a_second_version_is_copied_to_the_memory_of_one_that_has_gone() -> None:
    from gspo.model.serving_layout import ServedParameter
    from gspo_services.learner.weights.weight_copy import copy_parameters

    memory = CopyMemory()

    def copied(value: float) -> int:
        copy = copy_parameters([ServedParameter.alone("w", torch.full((1000,), value))], memory)
        return copy.pieces[0].data.ctypes.data

    assert copied(1.0) == copied(2.0)
    assert copy_weights([("w", torch.zeros(3))]).pieces[0].data.nbytes == 12
