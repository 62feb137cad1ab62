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
    # The working directory comes last, so that its files hide none of Python's.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    found = getattr(importlib.import_module(module_name), name, None)
    if not callable(found):
        raise ValueError(f'"{module_name}" has no function called "{name}"')
    return found  # type: ignore[no-any-return]


def load_agents(path: str) -> Any:
    """``gspo.agents`` from its file, under this name also for the user's imports, whether or not there is a ``gspo``.

    ``gspo.adapters`` is the folder beside it; an adapter is loaded when an agent's function, or the user's code, names it.
    """
    try:
        package = importlib.import_module("gspo")
    except Exception:  # noqa: BLE001 - it is missing, or its code is too new for this Python
        package = types.ModuleType("gspo", "Agents and adapters: the rest of this package is not installed for this Python.")
        package.__path__ = []
        sys.modules["gspo"] = package
    folder = os.path.join(os.path.dirname(path), "adapters")
    _load(package, "adapters", os.path.join(folder, "__init__.py"), folder)
    return _load(package, "agents", path)


def _load(package: types.ModuleType, name: str, path: str, folder: "str | None" = None) -> Any:
    """The module in the file ``path`` as ``name`` of ``package``; itself a package when ``folder`` is given."""
    spec = importlib.util.spec_from_file_location(
        f"gspo.{name}", path, submodule_search_locations=None if folder is None else [folder]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[f"gspo.{name}"] = module
    spec.loader.exec_module(module)
    vars(package)[name] = module
    return module
