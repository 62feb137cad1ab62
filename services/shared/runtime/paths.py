"""Paths as people write them."""

from __future__ import annotations

import os
import re
from pathlib import Path


def expanded(text: str) -> Path:
    """The path that ``text`` means, with ``~`` and ``$NAME`` filled in.

    Raises: ValueError for a variable that is not set and a home that is not known, unless a file is really called so.
    """
    path = os.path.expanduser(os.path.expandvars(text))
    if not os.path.lexists(path):
        if unset := re.search(r"\$(\w+|\{\w*\})", path):
            raise ValueError(f"{text}: the variable {unset[0]} is not set where this runs: set it, or write the path")
        if path.startswith("~"):
            raise ValueError(f"{text}: the home directory is not known: write the path")
    return Path(path)
