"""The first program of docs/gspo.md, "Use it in your own loop": its text, and what running it must print."""

import re
import subprocess
from pathlib import Path

from tests.support.pages import shown

# The sampled digits, and with them the rewards, are those of one seed.
SEED = "import torch\ntorch.manual_seed(0)\n"


def program() -> str:
    return SEED + shown("docs/gspo.md", "import torch")


def rewards_of(python: Path, code: str, folder: Path) -> list[float]:
    """Run `code` with an interpreter that sees nothing of this checkout; return the mean reward of each step.

    Raises AssertionError with the program's errors if it fails.
    """
    done = subprocess.run(
        [str(python), "-I", "-c", code], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return [float(reward) for reward in re.findall(r"^step \d+: reward (\S+)$", done.stdout, flags=re.MULTILINE)]
