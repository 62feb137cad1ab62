"""The table of a rank's memory against the resident set of ranks that have made a step, for three models.

What is compared: weights, gradients and their bucket, masters and moments, beyond a process that has trained a small model.
Activations of a few tokens are next to nothing; copies and versions need a broker.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from gspo.model_files.configuration import read_config
from gspo_services.shared.estimates import MemoryRow, memory_rows, shape_of
from gspo_services.shared.settings import Settings
from tests.support.learner.ranks import Ranks
from tests.support.starts.small_models import save_small_model

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1000)]

RANKS: Final = 2
COMPARED: Final = ("weights", "gradients", "masters and moments", "gradients on their way")
MOE: Final = {
    "hidden_size": 256,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_experts": 16,
    "vocab_size": 4096,
}
DENSE: Final = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "vocab_size": 4096}
MODELS: Final[dict[str, tuple[str, dict[str, Any], dict[str, Any]]]] = {
    "a mixture of experts": ("qwen3_moe", MOE, {"zero_stage": 3}),
    "dense, in bfloat16": ("llama", DENSE, {"zero_stage": 3, "dtype": "bfloat16"}),
    "tied and dense": ("qwen3_tied", DENSE, {"zero_stage": 3}),
}
"""Kind of model, changes of its configuration, section learner."""


@pytest.mark.parametrize("what", MODELS)
def test_the_table_is_within_a_tenth_of_what_ranks_take(tmp_path: Path, what: str) -> None:
    kind, changes, learner = MODELS[what]
    for name, own in (("small", {}), ("model", changes)):
        save_small_model(tmp_path / name, kind, learner.get("dtype", "float32"), **own)
    plan = tmp_path / "plan.json"
    starts = [{"model": str(tmp_path / name), "settings": learner, "with_step": True} for name in ("small", "model")]
    plan.write_text(json.dumps(starts), encoding="utf-8")
    with Ranks("tests.support.starts.start_worker", [str(plan)], RANKS, plan) as ranks:
        ranks.finish(900)
    found = [json.loads(plan.with_suffix(f".{rank}.out").read_text(encoding="utf-8"))[1] for rank in range(RANKS)]
    measured = sum(each["trained"] for each in found) / RANKS
    settings = Settings.model_validate({"learner": learner | {"num_ranks": RANKS}})
    rows = memory_rows(shape_of(read_config(tmp_path / "model")), settings, cuda=False)
    expected = sum(_exact(row) for row in rows if row.name in COMPARED)
    assert expected > 150 * 2**20, "too small a model to tell"
    assert measured == pytest.approx(expected, rel=0.1), (
        what,
        expected,
        [each["trained"] for each in found],
        [[row.name, row.host.low] for row in rows],
    )


def _exact(row: MemoryRow) -> float:
    assert row.host.low == row.host.high
    return row.host.high
