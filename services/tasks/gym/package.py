"""Imports reasoning-gym without the plots of the packages that it needs.

One of them imports matplotlib, which takes as long as all the rest, and makes a folder where none may be made.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from types import ModuleType
from typing import Any, Final

PLOTS: Final = (
    "matplotlib", "matplotlib.pyplot", "matplotlib.animation", "matplotlib.collections", "mpl_toolkits",
    "mpl_toolkits.mplot3d",
)  # fmt: skip


class _Nothing(ModuleType):
    """A module of which every name can be imported, and none is used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


@contextmanager
def _without_plots() -> Iterator[None]:
    absent = [name for name in PLOTS if name not in sys.modules]
    for name in absent:
        sys.modules[name] = _Nothing(name)
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


with _without_plots():
    from reasoning_gym.coaching import RangeAttributeDefinition
    from reasoning_gym.factory import CURRICULA, DATASETS

VERSION: Final = version("reasoning-gym")

__all__ = ["CURRICULA", "DATASETS", "VERSION", "RangeAttributeDefinition"]
