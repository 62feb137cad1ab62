"""Checks that SGLang's compiled kernels are for the CUDA of this Python's torch."""

import importlib.metadata
import mmap
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from gspo_services.shared.placement.visible import DEVICES, cuda_of_torch, this_machine
from gspo_services.shared.runtime.errors import ConfigurationError

PACKAGES: Final = ("sglang-kernel", "sgl-kernel")
"""The package's name, and its former one."""
_NEEDED: Final = re.compile(rb"\x00lib(?:cudart|nvrtc|cublas|cublasLt)\.so\.(\d+)[.\d]*\x00")
"""A library in the table of names that an ELF file begins with."""


def require_kernels(
    environment: Mapping[str, str] | None = None,
    *,
    devices: Path = DEVICES,
    torch_package: Path | None = None,
    path: Sequence[str] | None = None,
) -> None:
    """Check the kernels without loading them: SGLang says after half a minute that it cannot open libnvrtc.so.12.

    ``path``: where packages are; None: where this Python has them. Nothing is said of a machine without a GPU, or of
    kernels that name no library of CUDA. Raises: ConfigurationError.
    """
    cuda = cuda_of_torch(torch_package)
    if not cuda or not this_machine(environment, devices=devices, for_cuda=True).gpus:
        return
    for name, version, kernels in _installed(path):
        needed = _cuda_needed(kernels)
        if needed is not None and needed != int(cuda.split(".")[0]):
            raise ConfigurationError(
                f"{name} {version} is built for CUDA {needed}, and torch for CUDA {cuda}: SGLang could not load them; "
                f"install both for one CUDA (requirements/gpu.txt: `make setup-gpu`), or name the interpreter of an "
                "environment that has them in rollout.python"
            )


def _installed(path: Sequence[str] | None) -> Iterator[tuple[str, str, list[Path]]]:
    """Name, version and shared objects of each package that is installed."""
    for name in PACKAGES:
        for package in importlib.metadata.distributions(name=name, path=list(sys.path if path is None else path)):
            files = [Path(str(package.locate_file(file))) for file in package.files or () if file.suffix == ".so"]
            yield name, package.version, files


def _cuda_needed(kernels: Sequence[Path]) -> int | None:
    """The major release of CUDA whose libraries the first of these files names that names one."""
    for kernel in kernels:
        try:
            with kernel.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                if (found := _NEEDED.search(content)) is not None:
                    return int(found[1])
        except (OSError, ValueError):  # An empty file cannot be mapped.
            continue
    return None
