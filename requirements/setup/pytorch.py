"""Where PyTorch comes from: the configured index, PyTorch's own, or else the ordinary build with CUDA's libraries."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from pip_calls import LOCKED, Pip, SetupError, say
from preflight import space_missing

LISTS = Path(__file__).resolve().parents[1]
OWN_INDEX = "https://download.pytorch.org/whl/cpu"
"""PyTorch's own index of CPU builds. GSPO_TORCH_INDEX names a copy of it."""


@dataclass(frozen=True)
class Build:
    """A build of PyTorch: its locked list, and what the whole of .venv takes with it."""

    name: str
    list: str
    download: str
    disk_gb: float
    """Free space that a set-up needs, with pip's cache, in 1e9 bytes."""


CPU_BUILD = Build("the CPU build", "torch-cpu.txt", "190 MB", 5)
ORDINARY = Build("the ordinary build with CUDA's libraries", "torch-cuda.txt", "2.5 GB", 11)


def install(pip: Pip, folder: Path, wanted: str) -> None:
    """Install the locked version of PyTorch, or `wanted`, words for pip, unchecked.

    Raises: SetupError, also if there is no space for the ordinary build.
    """
    if wanted:
        say(f"PyTorch: {wanted}, as TORCH says; its hash is not checked")
        pip.install(*wanted.split())
        return
    if found := installed(folder):
        say(f"PyTorch {found} is there")
        return
    locked = (*LOCKED, "-r", str(LISTS / CPU_BUILD.list))
    say(f"PyTorch: looking for {CPU_BUILD.name} ({CPU_BUILD.download}) at the configured package index")
    if pip.install(*locked, may_be_missing=True):
        say("PyTorch: the CPU build, from the configured package index")
        return
    own = os.environ.get("GSPO_TORCH_INDEX") or OWN_INDEX
    reason = pip.why_dead(own)
    if reason is None:
        say(f"PyTorch: {CPU_BUILD.name} ({CPU_BUILD.download}) from {own}, since the configured index has none")
        # The configured index may be a mirror that has this one's files, too; the hashes decide.
        if pip.install(*locked, "--index-url", own, may_be_missing=True):
            return
        reason = "it has no such file for this Python"
    install_ordinary(pip, folder, f"the configured index has no CPU build, and {own} cannot be used: {reason}")


def install_ordinary(pip: Pip, folder: Path, reason: str) -> None:
    say(f"PyTorch: {ORDINARY.name} ({ORDINARY.download} to download), because {reason}")
    if complaints := space_missing(folder, ORDINARY.disk_gb):
        raise SetupError("; ".join(complaints))
    # cpu.txt has another version of Triton, which it brings later.
    later = {name_of(entry) for entry in requirement_lines(LISTS / "cpu.txt")}
    entries = [entry for entry in requirement_lines(LISTS / ORDINARY.list) if name_of(entry) not in later]
    one = folder / "one.txt"
    # One at a time: an interrupted set-up loses one download and not all, and the user sees it advance.
    for number, entry in enumerate(entries, 1):
        say(f"  {number} of {len(entries)}: {entry.split()[0]}")
        one.write_text(entry + "\n", encoding="utf-8")
        pip.install(*LOCKED, "-r", str(one))
    one.unlink(missing_ok=True)


def requirement_lines(path: Path) -> list[str]:
    """Each package of a list with its hashes, on one line."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    return [" ".join(line.split()) for line in text.splitlines() if line and not line.startswith("#")]


def name_of(entry: str) -> str:
    return entry.partition("==")[0]


def installed(folder: Path) -> str | None:
    """The version of PyTorch in an environment, if it is the locked one and can be imported."""
    code = "import torch; print(torch.__version__)"
    done = subprocess.run([folder / "bin" / "python", "-c", code], capture_output=True, text=True, check=False)
    (pin,) = [line.split()[0] for line in requirement_lines(LISTS / CPU_BUILD.list)]
    version = pin.partition("==")[2].partition("+")[0]
    found = done.stdout.strip()
    return found if done.returncode == 0 and found.partition("+")[0] == version else None
