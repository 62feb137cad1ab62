"""The CPU platform plug-in, as far as it can be tested without a server."""

import struct
import subprocess
import sys

import pytest
import torch

from gspo_services.shared.sglang_cpu import PLATFORM_NAME, activate
from gspo_services.shared.sglang_cpu.murmur import murmur_hash32


def murmur3_x86_32(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0 of a multiple of 4 bytes; source: A. Appleby, MurmurHash3.cpp."""
    mask, state = 0xFFFFFFFF, 0
    for start in range(0, len(data), 4):
        block = int.from_bytes(data[start : start + 4], "little") * 0xCC9E2D51 & mask
        block = ((block << 15 | block >> 17) & mask) * 0x1B873593 & mask
        state ^= block
        state = ((state << 13 | state >> 19) * 5 + 0xE6546B64) & mask
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B & mask
    state = (state ^ state >> 13) * 0xC2B2AE35 & mask
    return state ^ state >> 16


def test_the_sampling_hash_is_murmur3_of_seed_position_and_token() -> None:
    assert murmur3_x86_32(b"\x21\x43\x65\x87") == 0xF55B516B, "a published test vector"
    seeds, positions, columns = [0, 7, 2**63 - 1, 123456789012], [0, 1, 4095, 2**31 - 1], [0, 1, 151935]
    hashed = murmur_hash32(
        torch.tensor(seeds, dtype=torch.int64).to(torch.uint64), torch.tensor(positions), torch.tensor(columns)
    )
    expected = [
        [murmur3_x86_32(struct.pack("<QII", seed, position, column)) for column in columns]
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert hashed.tolist() == expected


def test_the_plug_in_is_inert_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    assert activate() is None
    monkeypatch.setenv("SGLANG_PLATFORM", "another")
    assert activate() is None


def test_asked_for_it_names_its_platform_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", PLATFORM_NAME)
    expected = None if torch.cuda.is_available() else "gspo_services.shared.sglang_cpu.platform.TorchCpuPlatform"
    assert activate() == expected


def test_importing_the_plug_in_imports_neither_torch_nor_sglang() -> None:
    code = "import sys, gspo_services.shared.sglang_cpu; print([m for m in ('torch', 'sglang') if m in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
