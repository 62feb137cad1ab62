"""Four real processes: their summed losses and gradients equal the formula over the whole step."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest

from tests.unit.gspo.conformance.properties import UNITS
from tests.unit.gspo.conformance.rank_worker import SEEDS, run_rank, step_of

NUM_RANKS = 4


def test_four_ranks_sum_to_the_formula_of_the_step(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.unit.gspo.conformance.rank_worker"])  # torch is imported once, not by every rank
    ranks = [context.Process(target=run_rank, args=(tmp_path, rank, NUM_RANKS)) for rank in range(NUM_RANKS)]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(timeout=200)
        assert [process.exitcode for process in ranks] == [0] * NUM_RANKS
    finally:
        for process in ranks:
            process.kill()
            process.join()
    results = [json.loads((tmp_path / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in range(NUM_RANKS)]
    assert results[1:] == results[:1] * (NUM_RANKS - 1)
    for seed in SEEDS:
        expected = step_of(seed).reference(UNITS[seed % 3])
        assert results[0][str(seed)]["loss"] == pytest.approx(expected.loss, rel=1e-12, abs=1e-15)
        gradient = [g for row in expected.gradients for g in row]
        assert results[0][str(seed)]["gradient"] == pytest.approx(gradient, rel=1e-12, abs=1e-15)
