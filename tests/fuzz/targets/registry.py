"""Every boundary at which the system reads what it did not write, or what an earlier process wrote."""

from typing import Final

from tests.fuzz.target import Target
from tests.fuzz.targets import configuration, deltas, disk, engine, pages, trees, wire

FAMILIES: Final[dict[str, tuple[Target, ...]]] = {
    "wire": wire.TARGETS,
    "deltas": deltas.TARGETS,
    "configuration": configuration.TARGETS,
    "engine": engine.TARGETS,
    "pages": pages.TARGETS,
    "disk": disk.TARGETS,
    "trees": trees.TARGETS,
}
"""Targets by family. Each family has a folder in the corpus."""
TARGETS: Final[dict[str, Target]] = {target.name: target for targets in FAMILIES.values() for target in targets}
