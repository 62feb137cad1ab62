"""Every boundary at which the system reads what it has not written itself, or wrote in another life."""

from typing import Final

from tests.fuzz import configuration, disk, engine, pages, wire
from tests.fuzz.target import Target

TARGETS: Final[dict[str, Target]] = {
    target.name: target for target in (*wire.TARGETS, *configuration.TARGETS, *engine.TARGETS, *pages.TARGETS, *disk.TARGETS)
}
