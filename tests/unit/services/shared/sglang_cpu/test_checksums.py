"""The hash of the CPU platform, which the rollout must know."""

from types import ModuleType

import pytest
import torch

from gspo_services.shared.sglang_cpu.platform import hash_with_xxh3
from gspo_services.shared.weights.checksums import engine_hash, hash_function


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(60, dtype=torch.float32).reshape(3, 4, 5),
        torch.arange(60, dtype=torch.bfloat16).reshape(3, 20).T,
        torch.tensor(2.5),
        torch.empty(0, 7),
        torch.nn.Parameter(torch.ones(3)),
    ],
    ids=["matrices", "transposed", "scalar", "empty", "parameter"],
)
def test_a_tensor_has_the_checksum_of_its_bytes(tensor: torch.Tensor) -> None:
    weight_checker = ModuleType("weight_checker")
    hash_with_xxh3(weight_checker)
    found = weight_checker._hash_tensor(tensor)
    name = engine_hash("cpu", [found])
    assert name == "xxh3"
    assert found == hash_function(name)([tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()])
