"""Imports users' modules: an environment or a reward function that a configuration names."""

import importlib
import os
import sys
from types import ModuleType
from typing import Final

USERS_FOLDER: Final = "GSPO_CONFIGURATION_FOLDER"
"""In the environment of processes that import the user's modules: the configuration's folder."""


def users_folder() -> str:
    """The folder in which the user's modules and programs are looked for first."""
    return os.environ.get(USERS_FOLDER) or os.getcwd()


def import_named(name: str) -> ModuleType:
    """Import a module from the import path, or else from the configuration's folder, or the working directory.

    They come last, so that their files hide no module of ours and none of Python's. Raises: ModuleNotFoundError that names
    the missing module; any error that the module itself raises.
    """
    for directory in (users_folder(), os.getcwd()):
        if directory not in sys.path:
            sys.path.append(directory)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(_explained(error), name=error.name) from error


def _explained(error: ModuleNotFoundError) -> str:
    if error.name is None:
        return str(error)  # The user's module itself raised it, with its own text.
    places = " or in ".join(dict.fromkeys((users_folder(), os.getcwd())))
    return f"there is no module {error.name} on the import path or in {places}"
