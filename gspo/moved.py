"""The import of a module that has moved fails with its new name."""

import sys
from collections.abc import Mapping
from importlib.abc import MetaPathFinder
from typing import Final

MOVED: Final = {
    "attention": "gspo.model.attention",
    "expert_layout": "gspo.moe.expert_layout",
    "experts": "gspo.moe.experts",
    "loss_inputs": "gspo.inputs.loss_inputs",
    "logprobs": "gspo.model.logprobs",
    "packing": "gspo.model.packing",
    "policy": "gspo.model.policy",
    "routing_replay": "gspo.moe.routing_replay",
    "serving": "gspo.model.serving",
    "units": "gspo.inputs.units",
    "validation": "gspo.inputs.validation",
}
"""New name by the name inside ``gspo``."""


class MovedModules(MetaPathFinder):
    """The last import finder, asked for modules that do not exist. Raises: ModuleNotFoundError for one that has moved."""

    def __init__(self, package: str, moved: Mapping[str, str]) -> None:
        self._moved = {f"{package}.{old}": new for old, new in moved.items()}

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        """Always None: nothing is loaded under an old name."""
        if fullname in self._moved:
            # Without ``name``: Python ignores an error about the submodule that ``from package import module`` names.
            raise ModuleNotFoundError(f"{fullname} has moved: import {self._moved[fullname]}")


def report_moves(package: str, moved: Mapping[str, str]) -> None:
    """Make the import of each ``moved`` module of ``package`` fail with its new name."""
    sys.meta_path.append(MovedModules(package, moved))
