"""What is missing for an installation, said before anything is downloaded."""

import os
import platform
import re
import shutil
import sys
import sysconfig
from pathlib import Path

OLDEST_GLIBC = (2, 34)
"""What SGLang's wheel is built for."""

MACHINES = ("x86_64", "aarch64")
"""What the locked files are for."""

OLDEST_DRIVER = 580
"""Of NVIDIA, which CUDA 13 needs."""


def complaints(folder: Path, need_gb: float) -> list[str]:
    """One line for each thing that is missing, with the way out; nothing if the installation can begin."""
    found: list[str] = []
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        found.append(
            f"this is {platform.system()} on {platform.machine()}: PyTorch, SGLang and DeepSpeed are locked for Linux on "
            f"{' or '.join(MACHINES)}; use such a machine, or a container or virtual machine of that kind"
        )
    else:
        library, version = platform.libc_ver()
        if library != "glibc" or tuple(map(int, version.split(".")[:2])) < OLDEST_GLIBC:
            wanted = ".".join(map(str, OLDEST_GLIBC))
            found.append(
                f"the C library is {library or 'not glibc'} {version}, and SGLang's files need glibc {wanted} or newer: "
                "use Debian 12, Ubuntu 22.04, RHEL 9 or newer"
            )
    writable = nearest(folder)
    if not os.access(writable, os.W_OK):
        found.append(f"{writable} cannot be written by this user: use a checkout of your own")
    else:
        found.extend(space_missing(writable, need_gb))
    return found


PYTHON_BELOW = re.compile(r"^# Needs Python below 3\.(\d+): (.+)$", re.MULTILINE)
COMPILED = re.compile(r"^# Needs a C compiler: (.+)$", re.MULTILINE)


def unmet(listed: str) -> list[str]:
    """One line for each need that a list of requirements names in its comments and this Python or machine does not meet."""
    found = [
        f"this is Python {sys.version_info[0]}.{sys.version_info[1]}, and {reason}: make the environments with Python "
        f"3.{int(minor) - 1}, as in: make PYTHON=python3.{int(minor) - 1} and the target"
        for minor, reason in PYTHON_BELOW.findall(listed)
        if sys.version_info >= (3, int(minor))
    ]
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for reason in COMPILED.findall(listed):
        compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
        lacking = {} if shutil.which(compiler) else {f"the C compiler {compiler}": "gcc"}
        if not Path(sysconfig.get_path("include"), "Python.h").is_file():
            lacking[f"the headers of {version}"] = f"{version}-dev"
        if lacking:
            found.append(
                f"{reason}, and there is no sign of {' or '.join(lacking)}. Debian, Ubuntu: sudo apt-get install "
                + " ".join(lacking.values())
            )
    return found


def space_missing(path: Path, need_gb: float) -> list[str]:
    """A line if there is less free than the environment needs, in gigabytes of 1e9 bytes."""
    free_gb = shutil.disk_usage(path).free / 1e9
    text = f"{path} has {free_gb:.1f} GB free, and the environment needs {need_gb:.1f} GB: free some, or use a larger disk"
    return [text] if free_gb < need_gb else []


def driver_too_old(version_file: Path) -> list[str]:
    """A line if the NVIDIA driver, where one is loaded, is older than CUDA 13 needs. `version_file` is the kernel's."""
    try:
        words = version_file.read_text(encoding="utf-8").split()
    except OSError:
        return []  # No driver is loaded: images are built on such machines.
    versions = [word.split(".")[0] for word in words if word[:1].isdigit() and "." in word]
    if versions and versions[0].isdigit() and int(versions[0]) < OLDEST_DRIVER:
        return [
            f"the GPUs' driver is {versions[0]}, and requirements/gpu.txt is for CUDA 13, which needs {OLDEST_DRIVER} or "
            "newer: update the driver"
        ]
    return []


def nearest(path: Path) -> Path:
    """The path itself, or the nearest folder above it that exists."""
    while not path.exists():
        path = path.parent
    return path
