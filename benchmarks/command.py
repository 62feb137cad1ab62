"""The command ``gspo``, as the benchmarks that compare whole runs start it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def gspo(*arguments: str, environment: Mapping[str, str] | None = None) -> None:
    """Run a command of this checkout. Raises: CalledProcessError if it fails."""
    subprocess.run([sys.executable, "-m", "gspo_services.cli.main", *arguments], check=True, env=environment)


def tiny_model(path: Path, seed: int, *, environment: Mapping[str, str] | None = None) -> None:
    """Make the demo's start model of this seed, if it is missing."""
    gspo("model", "tiny", str(path), "--seed", str(seed), "--if-missing", environment=environment)


def run(config: Path, directory: Path, *settings: str, environment: Mapping[str, str] | None = None) -> None:
    """Make a run in ``directory``, or go on with one that was stopped; a finished one stays as it is.

    Args:
        settings: "section.key=value".

    Raises: CalledProcessError.
    """
    flags = [word for setting in (f"run.directory={directory}", *settings) for word in ("--set", setting)]
    gspo("run", str(config), "--plain", *flags, environment=environment)
