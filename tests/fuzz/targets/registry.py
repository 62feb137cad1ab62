"""Every boundary at which the system reads what it has not written itself, or wrote in another life."""

from typing import Final

from tests.fuzz import configuration, deltas, disk, engine, pages, wire
from tests.fuzz.target import Target

_MODULES: Final = (wire, deltas, configuration, engine, pages, disk)
TARGETS: Final[dict[str, Target]] = {target.name: target for module in _MODULES for target in module.TARGETS}
