"""``gspo setup``: installs what a run needs beside this package, in the versions that are tested together.

Imports nothing but Python's standard library: whoever runs it has no more.
"""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from gspo_services.shared.runtime.errors import ConfigurationError


def setup_command(kind: Literal["cpu", "gpu"]) -> int:
    """Install the lists of ``kind`` into this environment. Returns the exit status.

    Raises: ConfigurationError when this installation has no lists, or this environment no pip.
    """
    script = _lists() / "setup" / "install.py"
    if find_spec("pip") is None:
        raise ConfigurationError(
            f"{sys.prefix} has no pip: add it with `{sys.executable} -m ensurepip`, or let your own installer take the "
            f"lists in {script.parents[1]}, without dependencies"
        )
    return subprocess.run([sys.executable, script, "here", kind], check=False).returncode


def _lists() -> Path:
    """Inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "requirements", package.parent / "requirements"):
        if (folder / "setup" / "install.py").is_file():
            return folder
    raise ConfigurationError(f"{package} has no lists of requirements: install gspo from its wheel or its sources")
