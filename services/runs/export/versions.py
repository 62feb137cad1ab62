"""The versions of the code and of the libraries that it runs with."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

LIBRARIES: Final = ("torch", "transformers", "deepspeed", "sglang", "safetensors", "numpy")
_ROOT: Final = Path(__file__).resolve().parents[3]
_GIT_S: Final = 10.0


def versions() -> list[tuple[str, str]]:
    """Return names and versions of gspo, Python and the installed libraries."""
    found = [("gspo", gspo_version()), ("python", platform.python_version())]
    return found + [(name, text) for name in LIBRARIES if (text := version_of(name))]


def gspo_version() -> str:
    """The release; in a checkout also its commit, and whether files differ from it."""
    release = version_of("gspo")
    if not (_ROOT / ".git").exists():
        return release
    try:
        # The directory may be another user's, which git refuses by an error: then the release has to do.
        command = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return release
    commit = done.stdout.strip()
    return f"{release}, commit {commit}" if done.returncode == 0 and commit else release


def version_of(name: str) -> str:
    """Return the version of an installed package; empty when it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
