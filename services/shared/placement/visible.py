"""Finds what this process may use of its machine."""

import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

DEVICES: Final = Path("/dev")
_CUDA: Final = re.compile(r"^cuda\b.*=\s*(\S+)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The resources that a run may assign."""

    gpus: tuple[str, ...]
    """Their names for CUDA_VISIBLE_DEVICES: numbers, or UUIDs where that variable already has them."""
    cores: tuple[int, ...]


def this_machine(
    environment: Mapping[str, str] | None = None, *, devices: Path = DEVICES, for_cuda: bool | None = None
) -> Machine:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names, or all with device files here, and the cores of this process.

    This asks neither driver nor torch, so it takes no time. ``for_cuda``: whether torch can use them; None: as this Python's
    torch was built. With a build for CPUs no machine has a GPU.
    """
    named = named_gpus(os.environ if environment is None else environment)
    present = sum(path.name.removeprefix("nvidia").isdecimal() for path in devices.glob("nvidia[0-9]*"))
    names = tuple(map(str, range(present))) if named is None else named
    usable = present and (torch_is_for_cuda() if for_cuda is None else for_cuda)
    return Machine(gpus=names if usable else (), cores=tuple(sorted(os.sched_getaffinity(0))))


def named_gpus(environment: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names; None: it is not set, so all."""
    text = environment.get("CUDA_VISIBLE_DEVICES")
    return None if text is None else tuple(word.strip() for word in text.split(",") if word.strip() not in ("", "-1"))


def torch_is_for_cuda(package: Path | None = None) -> bool:
    """Return whether torch, of this Python or in ``package``, was built for CUDA. Importing it would take a second."""
    return cuda_of_torch(package) != ""


def cuda_of_torch(package: Path | None = None) -> str | None:
    """The release of CUDA that torch was built for, such as "13.0"; empty: none, or no torch; None: it does not say."""
    if package is None:
        found = importlib.util.find_spec("torch")
        if found is None or not found.submodule_search_locations:
            return ""
        package = Path(found.submodule_search_locations[0])
    try:
        build = _CUDA.search((package / "version.py").read_text(encoding="utf-8"))
    except OSError:
        return None  # An unknown layout: the device files decide.
    return None if build is None else build[1].strip("'\"").replace("None", "")
