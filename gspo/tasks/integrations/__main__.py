"""``PYTHON gspo/tasks/integrations NAME ...``: writes an environment's tasks to a file, in the Python that has it.

It is started by its path, because that Python need not have this package.
"""

import importlib
import os
import sys
import types


def main() -> None:
    """Run ``main`` of the integration that the first argument names, with the other arguments."""
    here = os.path.dirname(os.path.abspath(__file__))
    # Python puts a script's folder first, where an integration would hide the package that it is named after.
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
    # Tasksets may lie in the working directory, as an agent's function may.
    sys.path.append(os.getcwd())
    package = types.ModuleType("gspo")
    package.__path__ = [os.path.dirname(os.path.dirname(here))]
    sys.modules["gspo"] = package
    try:
        importlib.import_module(f"gspo.tasks.integrations.{sys.argv[1]}").main(sys.argv[2:])
    except (ValueError, ImportError, OSError) as error:
        sys.stderr.write(f"gspo tasks {sys.argv[1]}: {error}\n(Python {sys.executable}, working directory {os.getcwd()})\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
