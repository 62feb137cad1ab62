"""Relative paths of a configuration file start at the folder that it lies in, wherever a command is started."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from gspo_services.shared.runtime.paths import is_hub_name

PATHS: Final[Mapping[str, tuple[str, ...]]] = {
    "run": ("directory",),
    "model": ("path",),
    "reward": ("model",),
    "agent": ("python",),
    "distillation": ("teacher",),
    "rollout": ("python", "weights_directory"),
    "learner": ("python",),
    "security": ("keys",),
}
"""By section, the settings that are paths; of an environment's options it is those whose name ends with "path"."""
DEFAULTS: Final[Mapping[str, Mapping[str, str]]] = {"run": {"directory": "runs/default"}, "model": {"path": "models/tiny"}}
"""Relative paths that a file means where it leaves them out."""


def placed(plain: Mapping[str, Any], folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Let the relative paths of ``plain``, a configuration file's tables, start at ``folder``, which may be relative itself.

    Returns the tables, and by each path that has changed what the file says. Values of the wrong type stay as they are.
    """
    told: dict[str, str] = {}

    def place(text: str) -> str:
        # A name of the hub is told apart from a path that is not there.
        if not is_relative(text) or is_hub_name(Path(text), folder):
            return text
        path = os.path.normpath(folder / text)
        # Settings have their variables filled in, an environment's options do not yet.
        told[path], told[os.path.expandvars(path)] = text, os.path.expandvars(text)
        return path

    filled = dict(plain)
    for section, values in DEFAULTS.items():
        if isinstance(table := filled.get(section, {}), Mapping):
            filled[section] = {**values, **table}
    return with_paths(filled, place), told


def is_relative(path: str) -> bool:
    """Whether ``path``, as a configuration says it, starts at a folder. A home or a variable stands for an absolute path."""
    return not path.startswith(("/", "~", "$")) and "://" not in path and "\0" not in path


def with_paths(plain: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """Return tables in which ``change`` has been applied to every path that is given."""
    changed = dict(plain)
    for section, keys in PATHS.items():
        if isinstance(table := plain.get(section), Mapping):
            changed[section] = {
                key: _changed(value, change) if key in keys and not _is_command(key, value) else value
                for key, value in table.items()
            }
    if isinstance(table := plain.get("environment"), Mapping):
        changed["environment"] = _with_options(table, change)
    if isinstance(table := plain.get("evaluation"), Mapping) and isinstance(sets := table.get("sets"), Mapping):
        own = {name: _with_options(each, change) if isinstance(each, Mapping) else each for name, each in sets.items()}
        changed["evaluation"] = {**table, "sets": own}
    return changed


def _is_command(key: str, value: Any) -> bool:
    """Whether it is a name that is looked for in PATH."""
    return key == "python" and isinstance(value, str) and "/" not in value


def _with_options(table: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    return {key: _options("", value, change) if key == "options" else value for key, value in table.items()}


def _options(name: str, value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _options(str(key), each, change) for key, each in value.items()}
    if isinstance(value, list):
        return [_options(name, each, change) for each in value]
    return _changed(value, change) if name.endswith("path") else value


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    return change(value) if isinstance(value, str) and value else value
