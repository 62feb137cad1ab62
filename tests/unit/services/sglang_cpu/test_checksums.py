"""The checksums of the CPU platform: SGLang's values, worked out side by side."""

import hashlib
import threading
from types import ModuleType
from typing import Any

import pytest

from services.sglang_cpu.checksums import hash_side_by_side

PATIENCE_S = 10.0


def a_checker(hash_tensor: Any) -> Any:
    """The part of sglang.srt.utils.weight_checker that is replaced, with its own way through it."""
    checker: Any = ModuleType("weight_checker")

    def overall_checksum(checksums: dict[str, str]) -> str:
        return hashlib.sha256("".join(name + checksums[name] for name in sorted(checksums)).encode()).hexdigest()

    def compute(tensors: dict[str, bytes]) -> tuple[dict[str, str], str]:
        checksums = {}
        for name, tensor in tensors.items():
            checksums[name] = checker._hash_tensor(tensor)
        overall = checker.overall_checksum(checksums)
        return checksums, overall

    checker._hash_tensor, checker.overall_checksum, checker.compute = hash_tensor, overall_checksum, compute
    return checker


def sha256(tensor: bytes) -> str:
    return hashlib.sha256(tensor).hexdigest()[:16]


def test_checksums_side_by_side_have_the_same_values_under_the_same_names() -> None:
    tensors = {f"p{index}": bytes([index]) * 5000 for index in range(40)}
    plain, quick = a_checker(sha256), a_checker(sha256)
    hash_side_by_side(quick, 3)
    expected = plain.compute(tensors)
    assert quick.compute(tensors) == expected
    assert quick.compute(tensors) == expected, "a second time"


def test_as_many_parameters_are_hashed_at_once_as_there_are_threads() -> None:
    together = threading.Barrier(3)

    def hash_when_three_are_there(tensor: bytes) -> str:
        together.wait(PATIENCE_S)
        return sha256(tensor)

    checker = a_checker(hash_when_three_are_there)
    hash_side_by_side(checker, 3)
    checksums, _ = checker.compute({name: name.encode() for name in "abcdef"})
    assert checksums["f"] == sha256(b"f")


def test_a_parameter_that_cannot_be_hashed_fails_the_whole_check() -> None:
    def refuse(tensor: bytes) -> str:
        raise ValueError(f"no hash of {tensor!r}")

    checker = a_checker(refuse)
    hash_side_by_side(checker, 2)
    with pytest.raises(ValueError, match="no hash of b'x'"):
        checker.compute({"p": b"x"})
