"""``PYTHON main.py SETTINGS``: become a worker, or a user's program under limits, under any Python."""

import importlib
import importlib.util
import json
import os
import sys
from typing import Any

PACKAGE = "_gspo_user_worker"
"""The name under which the worker's modules are loaded: no user has a package of this name, as many have "services"."""


def load(name: str, path: str, folder: str | None = None) -> Any:
    """Load the module in the file ``path`` under ``name``; it is a package when ``folder`` is given."""
    spec = importlib.util.spec_from_file_location(
        name, path, submodule_search_locations=None if folder is None else [folder]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Serve the episodes that the parent sends, or run a program: as the settings say, which are JSON."""
    here = os.path.dirname(os.path.abspath(__file__))
    # Python puts a script's folder first, where our modules would hide the user's of the same names.
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
    load(PACKAGE, os.path.join(here, "__init__.py"), here)
    settings = json.loads(sys.argv[1])
    if "program" in settings:
        importlib.import_module(f"{PACKAGE}.launch").become_program(settings)
    else:
        importlib.import_module(f"{PACKAGE}.process").serve(settings)


if __name__ == "__main__":
    main()
