"""What official runners and ours are asked about, and what the official ones said."""

import json
import re
from pathlib import Path
from typing import Any, Final, NamedTuple

FOLDER: Final = Path(__file__).parent
VERDICTS: Final = FOLDER / "verdicts.json"


class Case(NamedTuple):
    """A program for a row."""

    name: str
    row: str
    language: str
    program: str


def read_cases(file: str) -> list[Case]:
    """Programs of a file, each below a line "=== name | row | language"."""
    parts = re.split(r"^=== (.*) \| (.*) \| (.*)\n", (FOLDER / file).read_text(), flags=re.MULTILINE)[1:]
    return [Case(*parts[at : at + 3], parts[at + 3].removesuffix("\n")) for at in range(0, len(parts), 4)]


def recorded() -> dict[str, Any]:
    """By set: {"source": repository and commit, "verdicts": {name: whether the program is right}} (record.py)."""
    found: dict[str, Any] = json.loads(VERDICTS.read_text())
    return found
