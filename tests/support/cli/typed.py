"""The command `gspo` as a user types it."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def gspo(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gspo_services.cli.main", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
