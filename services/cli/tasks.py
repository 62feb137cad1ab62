"""``gspo tasks INTEGRATION ...``: write the tasks of somebody else's environment to a file, in the Python that has it."""

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import gspo.tasks.integrations

INTEGRATIONS: Final = Path(gspo.tasks.integrations.__file__).parent
TASKS_DESCRIPTION: Final = """\
Write the tasks of another project's environment to a file of rows, which the built-in task set "rows" reads.

  gspo tasks verifiers my_taskset --python VENV/bin/python --out tasks/train.jsonl --limit 1000
  gspo tasks openenv http://127.0.0.1:8000 --python VENV/bin/python --out tasks/train.jsonl --seeds 0:1000

`gspo tasks verifiers --python VENV/bin/python --help` lists the other options of an integration.
"""
_OF_OUR_PYTHON: Final = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


def tasks_command(words: Sequence[str]) -> int:
    """Replace this process by ``python`` with the integration's own command. Raises: ValueError without such a Python."""
    names = sorted(
        path.stem for path in INTEGRATIONS.glob("*.py") if "def main(arguments" in path.read_text(encoding="utf-8")
    )
    parser = argparse.ArgumentParser(
        prog="gspo tasks", description=TASKS_DESCRIPTION, add_help=bool(words) and words[0] not in names,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("integration", choices=names)
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has the environment's packages")
    given, others = parser.parse_known_args(words)
    python = shutil.which(given.python)
    if python is None:
        raise ValueError(f"there is no Python at {given.python!r}: name the interpreter of an environment, VENV/bin/python")
    # These variables describe our Python: another one would load packages built for ours.
    environment = {name: value for name, value in os.environ.items() if name not in _OF_OUR_PYTHON}
    os.execve(python, [python, str(INTEGRATIONS), given.integration, *others], environment)
