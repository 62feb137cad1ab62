"""Whether a driver is new enough for a build of torch."""

from pathlib import Path
from typing import Any

import pytest

from gspo_services.shared.placement import require_driver
from gspo_services.shared.runtime.errors import ConfigurationError

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder@U22)\n"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Fri Aug 25 00:00:00 UTC 2025\n"


def machine(folder: Path, driver: str, cuda: str, *, gpus: int = 1, text: str = CLOSED) -> dict[str, Any]:
    """A machine with so many GPUs, and a Python whose torch is built for this release of CUDA."""
    (folder / "version.py").write_text(f"cuda: Optional[str] = {cuda}\n")
    (folder / "driver").write_text(text.format(driver))
    (folder / "dev").mkdir(exist_ok=True)
    for number in range(gpus):
        (folder / "dev" / f"nvidia{number}").touch()
    return {"driver": folder / "driver", "devices": folder / "dev", "torch_package": folder}


@pytest.mark.parametrize("text", [OPEN, CLOSED])
def test_a_driver_that_is_too_old_is_named_with_the_oldest_that_would_do(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"driver is 535\.104\.05, and torch .* CUDA 13\.0, which needs 580"):
        require_driver({}, **machine(tmp_path, "535.104.05", "'13.0'", text=text))
    require_driver({}, **machine(tmp_path, "580.65.06", "'13.0'", text=text))
    require_driver({}, **machine(tmp_path, "535.104.05", "'12.8'", text=text))


def test_nothing_is_said_where_no_gpu_is_used_or_nothing_is_known(tmp_path: Path) -> None:
    old = machine(tmp_path, "450.1", "'13.0'")
    require_driver({"CUDA_VISIBLE_DEVICES": ""}, **old)
    require_driver({"LD_LIBRARY_PATH": "/usr/local/cuda/compat"}, **old)
    require_driver({}, **old | {"driver": tmp_path / "not there"})
    require_driver({}, **machine(tmp_path, "450.1", "None"))
    require_driver({}, **machine(tmp_path, "450.1", "'99.0'"))
    require_driver({}, **machine(tmp_path, "a driver of another form", "'13.0'"))
    for path in (tmp_path / "dev").iterdir():
        path.unlink()
    require_driver({}, **machine(tmp_path, "450.1", "'13.0'", gpus=0))


def test_this_machine_has_no_old_driver() -> None:
    require_driver()
