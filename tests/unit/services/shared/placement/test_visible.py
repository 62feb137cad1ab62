"""Which GPUs and cores a run may hand out."""

import os
from pathlib import Path

import pytest

from gspo_services.shared.placement import this_machine, torch_is_for_cuda


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    """A machine of three GPUs; the other files are the driver's."""
    for name in ("nvidia0", "nvidia1", "nvidia7", "nvidiactl", "nvidia-uvm", "nvidia-modeset"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("variable", "gpus"),
    [
        (None, ("0", "1", "2")),
        ("2,0", ("2", "0")),
        (" GPU-5d3a, GPU-77aa ", ("GPU-5d3a", "GPU-77aa")),
        ("", ()),
        ("-1", ()),
    ],
)
def test_the_variable_chooses_among_the_devices(variable: str | None, gpus: tuple[str, ...], devices: Path) -> None:
    environment = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    assert this_machine(environment, devices=devices, for_cuda=True).gpus == gpus


def test_a_machine_without_device_files_or_with_a_build_for_cpus_has_no_gpu(devices: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert this_machine({"CUDA_VISIBLE_DEVICES": "0"}, devices=tmp_path / "empty", for_cuda=True).gpus == ()
    assert this_machine({}, devices=devices, for_cuda=False).gpus == ()
    assert set(this_machine().cores) == os.sched_getaffinity(0)


@pytest.mark.parametrize(
    ("text", "is_for_cuda"),
    [
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n", False),
        ("__version__ = '2.14.1+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", True),
        ("cuda = None\n", False),
        ("nothing that we know\n", True),
    ],
)
def test_the_build_of_torch_is_read_and_not_imported(text: str, is_for_cuda: bool, tmp_path: Path) -> None:
    (tmp_path / "version.py").write_text(text)
    assert torch_is_for_cuda(tmp_path) is is_for_cuda


def test_this_environments_torch_says_what_torch_itself_says() -> None:
    import torch

    assert torch_is_for_cuda() is (torch.version.cuda is not None)
