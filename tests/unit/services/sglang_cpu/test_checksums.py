"""The checksums of the CPU platform: SGLang's values, worked out side by side."""

import hashlib
import threading
from types import ModuleType
from typing import Any

import pytest
import torch

from services.sglang_cpu.checksums import hash_side_by_side

PATIENCE_S = 10.0


def a_checker(hash_tensor: Any) -> Any:
    """The parts of sglang.srt.utils.weight_checker that are replaced, with its own way through them."""
    checker: Any = ModuleType("weight_checker")

    def overall_checksum(checksums: dict[str, str]) -> str:
        return hashlib.sha256("".join(name + checksums[name] for name in sorted(checksums)).encode()).hexdigest()

    def compute(model: torch.nn.Module) -> tuple[dict[str, str], str]:
        quantized = checker._build_quantized_set(model)
        checksums = {}
        for name, tensor in model.named_parameters():
            checksums[name] = checker._hash_tensor((tensor * 2 if name in quantized else tensor).data)
        overall = checker.overall_checksum(checksums)
        return checksums, overall

    checker._hash_tensor, checker.overall_checksum, checker.compute = hash_tensor, overall_checksum, compute
    checker._build_quantized_set = lambda model: {"2"}
    return checker


def a_model(number: int = 40) -> torch.nn.Module:
    """Parameters of 6,000 bytes, of which two share their bytes, as embedding and output layer may."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.nn.Parameter(torch.randn(30, 50, generator=generator)) for _ in range(number)]
    tensors.append(torch.nn.Parameter(tensors[0].data.t()))
    return torch.nn.ParameterList(tensors)


def sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()[:16]


def test_checksums_side_by_side_have_the_same_values_under_the_same_names() -> None:
    plain, quick = a_checker(sha256), a_checker(sha256)
    hash_side_by_side(quick, 3)
    model = a_model()
    before = plain.compute(model)
    assert quick.compute(model) == before
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1
    assert quick.compute(model) == plain.compute(model) != before


def test_as_many_parameters_are_hashed_at_once_as_there_are_threads() -> None:
    together = threading.Barrier(3)

    def hash_when_three_are_there(tensor: torch.Tensor) -> str:
        together.wait(PATIENCE_S)
        return sha256(tensor)

    checker = a_checker(hash_when_three_are_there)
    hash_side_by_side(checker, 3)
    checker._build_quantized_set(a_model(5))
    checksums = {"p": checker._hash_tensor(torch.ones(3)), "q": checker._hash_tensor(torch.ones(4))}
    checksums["r"] = checker._hash_tensor(torch.ones(5))
    checker.overall_checksum(checksums)
    assert checksums["p"] == sha256(torch.ones(3))


def test_hashing_begins_before_the_modules_were_walked_through() -> None:
    hashed = threading.Event()

    def hash_tensor(tensor: torch.Tensor) -> str:
        hashed.set()
        return sha256(tensor)

    checker = a_checker(hash_tensor)
    walked: list[bool] = []
    checker._build_quantized_set = lambda model: walked.append(hashed.wait(PATIENCE_S)) or set()
    hash_side_by_side(checker, 1)
    checker.compute(a_model(2))
    assert walked == [True]


def test_a_parameter_that_cannot_be_hashed_fails_the_whole_check() -> None:
    def refuse(tensor: torch.Tensor) -> str:
        raise ValueError(f"no hash of {len(tensor)}")

    checker = a_checker(refuse)
    hash_side_by_side(checker, 2)
    with pytest.raises(ValueError, match="no hash of 30"):
        checker.compute(a_model(1))
