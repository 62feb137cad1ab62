"""The table of a rank's memory: what each row says, and how it is shown."""

from typing import Any

import pytest

from gspo_services.shared.estimates import MemoryRow, Span, learner_memory, memory_rows, memory_text, shape_of
from gspo_services.shared.settings import Settings
from tests.support.checking.shapes import QWEN3_30B, TINY

GIB = 2**30
SHAPE = shape_of(QWEN3_30B)


def rows(*, cuda: bool = True, **learner: Any) -> dict[str, MemoryRow]:
    given = {"num_ranks": 8, "zero_stage": 3, "dtype": "bfloat16"} | learner
    settings = Settings.model_validate({"model": {"dtype": "bfloat16"}, "learner": given})
    return {row.name: row for row in memory_rows(SHAPE, settings, cuda=cuda)}


def exactly(value: float) -> Span:
    return Span(value, value)


def test_each_rank_has_its_share_and_rank_0_what_it_writes() -> None:
    found, number = rows(), SHAPE.parameters
    assert found["weights"].device == exactly(2 * number / 8)
    assert found["gradients"].device == exactly(4 * number / 8)
    assert found["masters and moments"].device == exactly(12 * number / 8)
    assert found["checkpoint"].host == exactly(12 * number / 8)
    assert found["checkpoint"].host_of_rank_0 == exactly(GIB / 2)
    assert found["versions"].host == Span(2 * number, 7 * number) * (1 / 8)
    assert found["export"].host_of_rank_0 == exactly(2 * GIB)
    assert "reference" not in found
    assert found["together"].host == found["checkpoint"].host + found["versions"].host
    assert found["together"].device.low > (2 + 4 + 12) * number / 8


def test_offload_moves_a_row_to_the_host() -> None:
    found, number = rows(offload="optimizer_and_parameters"), SHAPE.parameters
    assert (found["weights"].device.high, found["weights"].host) == (0, exactly(2 * number / 8))
    assert (found["gradients"].device.high, found["gradients"].host) == (0, exactly(8 * number / 8))
    assert found["masters and moments"].host == exactly(12 * number / 8)


def test_copies_of_a_checkpoint_have_a_budget_for_all_ranks_of_a_machine() -> None:
    assert rows(checkpoint_copy_gib=16)["checkpoint"].host == exactly(2 * GIB)
    assert rows(checkpoint_in_background=False)["checkpoint"].host == exactly(0)


def test_without_gpus_everything_is_on_the_host() -> None:
    on_gpus, on_host = rows(), rows(cuda=False)
    assert all(row.device.high == 0 for row in on_host.values())
    assert on_host["weights"].host == on_gpus["weights"].device


def test_ranks_that_share_experts_hold_a_part_of_their_gradients_without_zero_3() -> None:
    found = rows(zero_stage=2, expert_parallel=4)
    assert found["weights"].device == exactly(2 * (SHAPE.other_parameters + SHAPE.expert_parameters / 4))


@pytest.mark.parametrize("cuda", [True, False])
def test_lines_are_equally_wide_and_the_last_is_the_sum(cuda: bool) -> None:
    lines = memory_text(memory_rows(shape_of(TINY), Settings(), cuda=cuda)).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[0].split() == ["GiB", "device", "host", "rank", "0", "also"]
    assert lines[-1].startswith("together")
    memory = learner_memory(shape_of(TINY), Settings(), cuda=cuda)
    assert f"{memory.weights / GIB:.2g}" in lines[1]
