"""The head's kernels in Triton's interpreter against float64, and compiled for a GPU. No GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[5]


def told(worker: str, folder: Path, **environment: str) -> list[str]:
    command = [sys.executable, "-W", "error", "-m", f"tests.support.head.{worker}"]
    given = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(folder), **environment}
    return subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.timeout(300)
def test_kernels_are_as_close_to_float64_as_plain_pytorch(tmp_path: Path) -> None:
    cases = [json.loads(line) for line in told("interpreted", tmp_path, TRITON_INTERPRET="1")]
    assert len(cases) == 8
    for case in cases:
        # The interpreter cuts off what bfloat16 has no room for, where a GPU rounds: at most twice the error.
        of_plain, least = (2.5, 1e-3) if case["dtype"] == "torch.bfloat16" else (0.0, 1e-5)
        logprobs, *others = zip(case["kernels"], case["plain"], strict=True)
        assert logprobs[0] <= max(logprobs[1], 1e-6), case
        for found, plain in others:
            assert found <= max(of_plain * plain, least), case


@pytest.mark.timeout(300)
def test_kernels_compile_for_a_hopper_gpu_and_spill_nothing(tmp_path: Path) -> None:
    assert told("compiled", tmp_path) == ["_sums 0", "_sums 0", "_slopes 0 rounds", "_slopes 0"]
