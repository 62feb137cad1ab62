"""The hardware of this machine, or that somebody named."""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import psutil

from gspo_services.shared.estimates import Device, Hardware, device_named, known_devices
from gspo_services.shared.placement import named_gpus
from gspo_services.shared.runtime.errors import ConfigurationError

QUERY: Final = ("nvidia-smi", "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits")
QUERY_S: Final = 10.0
NAMED_CORES: Final = 16
"""Assumed of a machine that was only named: cores for the learner's machine and for each rollout."""
MIB: Final = 2.0**20
LIMITS: Final = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Of memory, with cgroups of version 2 and 1."""


def named_hardware(name: str, num_devices: int) -> Hardware:
    """The hardware of ``--gpu NAME --gpus N``. Raises: ConfigurationError for a name that is not known."""
    device = device_named(name)
    if device is None:
        raise ConfigurationError(
            f"--gpu is {name[:100]!r}: not a GPU whose figures are known; use {', '.join(known_devices())}"
        )
    return Hardware(device=device, num_devices=num_devices, cores=NAMED_CORES, is_named=True)


def hardware_here(*, for_cuda: bool) -> Hardware:
    """What this machine has. Without nvidia-smi, with CUDA_VISIBLE_DEVICES empty, or with builds for CPUs it has no GPU.

    ``for_cuda``: the run's builds of torch can use a GPU.
    """
    devices = _devices(named_gpus(os.environ)) if for_cuda else []
    return Hardware(
        device=devices[0] if devices else None,
        num_devices=len(devices),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=min(float(psutil.virtual_memory().total), _limit()),
    )


def _limit() -> float:
    """What a container allows this process; infinite without one."""
    for path in LIMITS:
        with suppress(OSError, ValueError):
            return float(path.read_text())
    return math.inf


def _devices(visible: Sequence[str] | None) -> list[Device]:
    if visible is not None and not visible:
        return []
    try:
        answer = subprocess.run(QUERY, capture_output=True, text=True, timeout=QUERY_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    found = []
    for line in answer.splitlines():
        name, mib, capability = ["", "", *map(str.strip, line.rsplit(",", 2))][-3:]
        if mib.isdecimal():
            found.append(replace(_device(name, int(mib) * MIB), capability=_capability(capability)))
    return found if visible is None else found[: len(visible)]


def _capability(text: str) -> tuple[int, int] | None:
    major, _, minor = text.partition(".")
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None


def _device(name: str, memory_bytes: float) -> Device:
    known = device_named(name, memory_bytes)
    return known or Device(name=name, memory_bytes=memory_bytes, bandwidth=None, peak=None)
