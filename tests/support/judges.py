"""Programs of the environment that judge this project's files, as tests call them."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def objections(*words: str | Path, folder: Path = ROOT) -> str:
    """What a program of this environment says against its arguments; empty when it ends with 0 and says nothing wrong."""
    program, *arguments = map(str, words)
    done = subprocess.run(
        [str(BIN / program), *arguments], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr or f"{program} ended with {done.returncode}"


def objections_of_schema(schema: str, *files: Path) -> str:
    """What check-jsonschema says of files; its schemas are its own, nothing is fetched."""
    return objections("check-jsonschema", "--builtin-schema", f"vendor.{schema}", *files)
