"""Imports users' modules: an environment or a reward function that a configuration names."""

import importlib
import os
import sys
from types import ModuleType


def import_named(name: str) -> ModuleType:
    """Import a module from the import path, or else from the working directory.

    The working directory comes last, so its files hide no module of ours and none of Python's. Raises: ModuleNotFoundError
    that names the missing module; any error that the module itself raises.
    """
    directory = os.getcwd()
    if directory not in sys.path:
        sys.path.append(directory)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(_explained(error), name=error.name) from error


def _explained(error: ModuleNotFoundError) -> str:
    if error.name is None:
        return str(error)  # The user's module itself raised it, with its own text.
    return f"there is no module {error.name} on the import path or in the working directory"
