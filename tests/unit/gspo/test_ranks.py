"""Four real processes: the summed losses and gradients are those of the formula over the whole step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.gspo.conformance import UNITS
from tests.unit.gspo.rank_worker import SEEDS, step_of

NUM_RANKS = 4


def test_four_ranks_sum_to_the_formula_of_the_step(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.unit.gspo.rank_worker", str(tmp_path)]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen([*command, str(rank), str(NUM_RANKS)], env=environment) for rank in range(NUM_RANKS)]
    try:
        assert [process.wait(timeout=120) for process in ranks] == [0] * NUM_RANKS
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    results = [json.loads((tmp_path / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in range(NUM_RANKS)]
    assert results[1:] == results[:1] * (NUM_RANKS - 1)
    for seed in SEEDS:
        expected = step_of(seed).reference(UNITS[seed % 3])
        assert results[0][str(seed)]["loss"] == pytest.approx(expected.loss, rel=1e-12, abs=1e-15)
        gradient = [g for row in expected.gradients for g in row]
        assert results[0][str(seed)]["gradient"] == pytest.approx(gradient, rel=1e-12, abs=1e-15)
