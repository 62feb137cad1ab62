"""The model, its loss and AdamW on a GPU that only checks devices, shapes and types: tests/support/learner/fake_gpu.py."""

import json
from typing import Any

import pytest

from tests.support.learner.ranks import Ranks
from tests.support.learner.waits import planted_at

WORKER = "tests.support.learner.fake_gpu_worker"


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """One step for each planted fault, and one without."""
    results = tmp_path_factory.mktemp("fake") / "results.json"
    with Ranks(WORKER, [str(results)], 1, results) as ranks:
        ranks.finish(300)
    found: dict[str, dict[str, Any]] = json.loads(results.read_text(encoding="utf-8"))
    return found


def test_a_step_takes_a_gpus_branches_and_copies_only_its_batch(steps: dict[str, dict[str, Any]]) -> None:
    operations, copies = steps[""]["operations"], steps[""]["copies"]
    # One of attention and three products of experts in each of two layers, the latter with their backward.
    assert operations["torch_attn::_varlen_attn"] == operations["torch_attn::_varlen_attn_backward"] == 2
    assert operations["aten::_grouped_mm"] == 12
    assert operations["aten::_fused_adamw_"] == 1
    # Four rows of 64 tokens, a chunk each.
    assert operations["gspo::logit_sums"] == operations["gspo::logit_slopes_"] == 4
    by_file = {line.rpartition(":")[0]: count for line, count in copies.items()}
    wanted = {"gspo/model/packing.py": 11, "gspo/model/boundaries.py": 1, "gspo/calibration.py": 3}
    assert by_file == {f"cpu -> gpu at {file}": count for file, count in wanted.items()}


@pytest.mark.parametrize(
    ("fault", "error"),
    [("item", "DataDependentOutput"), ("host", "FakeTensorDeviceMismatch"), ("mask", "DynamicOutputShape")],
)
def test_a_fault_planted_in_a_layer_is_refused_at_its_line(steps: dict[str, dict[str, Any]], fault: str, error: str) -> None:
    kind, _, place = steps[fault]["refused"].partition(" at ")
    assert (kind.startswith(error), place) == (True, planted_at(WORKER, fault))


def test_a_copy_to_the_host_planted_in_a_layer_is_counted_at_its_line(steps: dict[str, dict[str, Any]]) -> None:
    assert steps["cpu"]["copies"][f"gpu -> cpu at {planted_at(WORKER, 'cpu')}"] == 1
