"""What nvidia-smi says of this machine, and what follows for the run."""

import os
from pathlib import Path

import pytest

from gspo_services.prepare.check.gpus import hardware_here
from gspo_services.shared.estimates import Device, Hardware
from gspo_services.shared.placement import require_bfloat16
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings import load_settings
from tests.support.checking.projects import Project

ASKED = "--query-gpu=name,memory.total,compute_cap --format=csv,noheader,nounits"


def answering(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> Hardware:
    """The hardware of a machine whose nvidia-smi answers this to the one question that it knows."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n[ \"$*\" = '{ASKED}' ] || exit 1\ncat <<END\n{text}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return hardware_here(for_cuda=True)


def test_devices_have_their_names_memory_and_capability(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = answering(tmp_path, "Tesla T4, 15360, 7.5\nQuadro, of a kind, 8192, [N/A]", monkeypatch)
    assert found.num_devices == 2
    assert found.device is not None
    assert (found.device.name, found.device.memory_bytes, found.device.capability) == ("Tesla T4", 15360 * 2**20, (7, 5))
    other = answering(tmp_path, "Quadro, of a kind, 8192, [N/A]\nnonsense", monkeypatch)
    assert (other.num_devices, other.device) == (
        1,
        Device(name="Quadro, of a kind", memory_bytes=2.0**33, bandwidth=None, peak=None),
    )
    assert answering(tmp_path, "NVIDIA H100 80GB HBM3, 81559, 9.0", monkeypatch).device is not None


def test_a_gpu_without_bfloat16_is_named_before_a_run(project: Project) -> None:
    old = Device(name="Tesla V100-SXM2-32GB", memory_bytes=2.0**35, bandwidth=None, peak=None, capability=(7, 0))
    for dtype, device, expected in (
        ("bfloat16", old, ["fail"]),
        ("float32", old, []),
        ("bfloat16", Device(name="A10", memory_bytes=2.0**35, bandwidth=None, peak=None, capability=(8, 6)), []),
        ("bfloat16", Device(name="A10", memory_bytes=2.0**35, bandwidth=None, peak=None), []),
    ):
        project.keys |= {"model.dtype": dtype, "learner.dtype": "float32"}
        findings = project.findings(Hardware(device=device, num_devices=2), code=False)
        named = [finding for finding in findings if finding.check == "bfloat16"]
        assert [finding.status for finding in named] == expected
        for finding in named:
            assert "model.dtype: bfloat16, which Tesla V100-SXM2-32GB has not" in finding.text
            assert "learner.dtype" not in finding.text
            assert "use a newer GPU" in finding.way_out


def test_a_learner_asks_for_bfloat16_too() -> None:
    settings = load_settings(None, ["learner.dtype=bfloat16"])
    with pytest.raises(ConfigurationError, match=r"^learner\.dtype: .*T4 has not: its compute capability is 7\.5, .* 8\.0"):
        require_bfloat16(settings, "Tesla T4", (7, 5))
    require_bfloat16(settings, "A100", (8, 0))
