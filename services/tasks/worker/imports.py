"""Finds the agent's function, and gives the user's code the module that it may import from this project."""

import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from typing import Any


def find_function(path: str) -> "Callable[..., Any]":
    """The function at "package.module:function". Raises: ValueError when there is none, and what its module raises."""
    module_name, colon, name = path.partition(":")
    if not colon:
        raise ValueError(f'"{path}" is not of the form "package.module:function"')
    # The configuration's folder and the working directory come last, so that their files hide none of Python's.
    for folder in (os.environ.get("GSPO_CONFIGURATION_FOLDER"), os.getcwd()):
        if folder and folder not in sys.path:
            sys.path.append(folder)
    found = getattr(importlib.import_module(module_name), name, None)
    if not callable(found):
        raise ValueError(f'"{module_name}" has no function called "{name}"')
    return found  # type: ignore[no-any-return]


def load_agents(path: str) -> Any:
    """``gspo.tasks.agents`` from its file, under this name also for the user's imports, whether or not there is a ``gspo``.

    The package ``gspo.tasks`` is the folder of that file, so the user's code finds the integrations.
    """
    try:
        package = importlib.import_module("gspo")
    except Exception:  # noqa: BLE001 - it is missing, or its code is too new for this Python
        package = types.ModuleType(
            "gspo", "Agents and integrations: the rest of this package is not installed for this Python."
        )
        package.__path__ = []
        sys.modules["gspo"] = package
    folder = os.path.dirname(path)
    spec = importlib.util.spec_from_file_location(
        "gspo.tasks", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    assert spec is not None
    assert spec.loader is not None
    tasks = importlib.util.module_from_spec(spec)
    sys.modules["gspo.tasks"] = tasks
    spec.loader.exec_module(tasks)
    vars(package)["tasks"] = tasks
    return importlib.import_module("gspo.tasks.agents")
