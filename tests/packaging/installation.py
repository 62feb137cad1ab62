"""Copies of the source tree, wheels built from them, and environments that hold one of these wheels."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("gspo", "protocol", "services", "requirements", "setup.py", "pyproject.toml", "README.md", "LICENSE")
THIRD_PARTIES = Path(pytest.__file__).parents[1]
BUILD = ("--no-deps", "--no-build-isolation", "--quiet")


def copy_sources(folder: Path) -> Path:
    """Copy what a build reads. Returns ``folder``."""
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def pip(*arguments: str | Path, python: Path | None = None, path: Path | None = None) -> None:
    """Run this environment's pip, for the environment of ``python`` if there is one. ``path``: more to import from."""
    which = [] if python is None else ["--python", str(python)]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *which, *map(str, arguments)]
    environment = os.environ if path is None else {**os.environ, "PYTHONPATH": str(path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def build_wheel(source: Path, out: Path) -> Path:
    """The wheel of ``source``, built as `pip install` builds it, without the package index."""
    pip("wheel", *BUILD, "--wheel-dir", out, source)
    (built,) = out.glob("*.whl")
    return built


def files_of(wheel: Path) -> dict[str, bytes]:
    """Path and content of each file in the wheel, without the metadata."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}


def environment(folder: Path) -> Path:
    """Make an environment without packages. Returns its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    return folder / "bin" / "python"


def show_third_parties(python: Path) -> None:
    """Let the environment of ``python`` import what this one has installed, but not this checkout.

    Python reads no .pth file of a folder that a .pth file names, so the finder of the editable installation stays unused.
    Call it after pip: pip would take the editable installation's metadata for an installed gspo.
    """
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    (packages / "third_parties.pth").write_text(f"{THIRD_PARTIES}\n")


def tools_of_a_build(folder: Path) -> Path:
    """A folder from which setuptools can be imported, and nothing else. Returns ``folder``."""
    folder.mkdir()
    for pattern in ("setuptools*", "_distutils_hack"):
        for path in THIRD_PARTIES.glob(pattern):
            (folder / path.name).symlink_to(path)
    return folder


def environment_of_a_user() -> dict[str, str]:
    """Our environment variables without those by which Python would find more modules, or fewer."""
    hidden = ("PYTHONPATH", "PYTHONSAFEPATH", "VIRTUAL_ENV")
    return {key: value for key, value in os.environ.items() if key not in hidden}
