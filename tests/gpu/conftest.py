"""All tests that need a GPU are here; without one they are skipped with the reason."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU and a CUDA build of PyTorch")
