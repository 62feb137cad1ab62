"""Code blocks of README.md, so that tests run what it shows."""

import itertools
import textwrap
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def block(heading: str, first_line: str) -> str:
    """The indented block of a section that begins with this line. Raises: ValueError when there is none."""
    lines = README.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0].splitlines()
    begin = lines.index(f"    {first_line}")
    shown = itertools.takewhile(lambda line: not line or line.startswith("    "), lines[begin:])
    return textwrap.dedent("\n".join(shown))
