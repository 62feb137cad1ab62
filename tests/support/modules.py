"""Every module of the three packages."""

from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = {"gspo_protocol": "protocol", "gspo": "gspo", "gspo_services": "services"}


@cache
def modules() -> dict[str, Path]:
    """Every module of the three packages, by its dotted name; a package by its own."""
    found = {}
    for top, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = (top, *path.relative_to(ROOT / folder).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found
