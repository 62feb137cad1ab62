"""Which test modules belong together. The session asks, which imports none of them: it reads them."""

import re
from functools import cache
from pathlib import Path

SHARED = ("sglang_server",)
"""Fixtures of which the whole session makes one: it takes half a minute of CPU to start."""


@cache
def group_of(module: Path) -> str | None:
    """The shared fixture that a test module names; None: it is a group of its own."""
    words = set(re.findall(r"\w+", module.read_text(encoding="utf-8")))
    return next((name for name in SHARED if name in words), None)
