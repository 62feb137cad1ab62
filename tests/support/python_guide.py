"""The program that the guide for scripts shows."""

import textwrap
from itertools import takewhile
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "python.md"


def shown(first_line: str) -> str:
    """The indented block that begins with this line."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    begin = lines.index(f"    {first_line}")
    return textwrap.dedent("\n".join(takewhile(lambda line: not line or line.startswith("    "), lines[begin:])))
