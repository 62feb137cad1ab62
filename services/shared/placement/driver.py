"""Checks that the driver of this machine's GPUs is new enough for this Python's torch."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from gspo_services.shared.placement.visible import DEVICES, cuda_of_torch, this_machine
from gspo_services.shared.runtime.errors import ConfigurationError

DRIVER: Final = Path("/proc/driver/nvidia/version")
OLDEST_DRIVER: Final = {11: 450, 12: 525, 13: 580}
"""Of each major release of CUDA on Linux (NVIDIA, CUDA Toolkit Release Notes, table 2): a program built for any of its minor
releases runs from there on."""
_KERNEL_MODULE: Final = re.compile(r"Kernel Module\b.*?\s((\d+)(?:\.\d+)+)\s")


def require_driver(
    environment: Mapping[str, str] | None = None,
    *,
    driver: Path = DRIVER,
    devices: Path = DEVICES,
    torch_package: Path | None = None,
) -> None:
    """Check the driver, without torch, which would say that there is no GPU. Nothing is said of a machine that has none, or
    where NVIDIA's package for newer programs on older drivers (cuda-compat) is on the library path.

    Raises: ConfigurationError.
    """
    given = os.environ if environment is None else environment
    cuda = cuda_of_torch(torch_package)
    if not cuda or "compat" in given.get("LD_LIBRARY_PATH", ""):
        return
    if not this_machine(given, devices=devices, for_cuda=True).gpus:
        return
    try:
        found = _KERNEL_MODULE.search(driver.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return
    oldest = OLDEST_DRIVER.get(int(cuda.split(".")[0]), 0)
    if found and int(found[2]) < oldest:
        raise ConfigurationError(
            f"the GPUs' driver is {found[1]}, and torch is built for CUDA {cuda}, which needs {oldest} or newer: torch "
            "would say that there is no GPU; update the driver, install a build of torch for an older CUDA, or put "
            "cuda-compat on LD_LIBRARY_PATH"
        )
