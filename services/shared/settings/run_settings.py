"""settings.json in the run's directory: the settings of the run's last start, as told. Only the broker writes it.

``folder`` in it says where relative paths start, so that commands find the run's model and data from anywhere.
"""

import json
import os
from pathlib import Path
from typing import Any, Final

from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings.configuration import found_on_hub, require_plain, validated
from gspo_services.shared.settings.folder import is_relative, placed, with_paths
from gspo_services.shared.settings.keys import FORMERLY, REMOVED
from gspo_services.shared.settings.sections import Settings
from gspo_services.shared.settings.told import told_settings

SETTINGS_FILE: Final = "settings.json"
FOLDER: Final = "folder"


def write_run_settings(settings: Settings) -> None:
    """Replace the file. Raises: OSError."""
    path = settings.run.directory / SETTINGS_FILE
    partial = path.with_name(f".partial-{path.name}")
    folder = os.path.abspath(settings.folder)
    # Paths from the command line start at the working directory.
    told = set(settings.told_paths.values())
    plain = told_settings(settings)
    if settings.folder:
        plain = with_paths(
            plain, lambda given: os.path.abspath(given) if given not in told and is_relative(given) else given
        )
    partial.write_text(json.dumps({FOLDER: folder, **plain}, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)


def several_brokers_in(directory: Path) -> str:
    """Why this release cannot read the run in ``directory``: several brokers shared it. Empty: none did.

    What else its settings.json says does not matter here: it may be of another release.
    """
    try:
        broker = json.loads((directory / SETTINGS_FILE).read_text(encoding="utf-8"))["broker"]
        number = int(broker.get("num_brokers", 1))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        number = 1
    if number == 1 and (directory / "broker-1" / SETTINGS_FILE).is_file():
        number = 2
    if number == 1:
        return ""
    return (
        f"{directory} is a run of several brokers, or the part of one of them, and this release has one broker a run: gspo "
        "0.1.0 reads it. Finish it with that release, or export it with that release and begin a new run from the export"
    )


def read_run_settings(directory: Path) -> Settings:
    """Read the settings of a run's last start.

    Raises: ConfigurationError when they are missing, are not settings of this release, or several brokers shared the run.
    """
    if reason := several_brokers_in(directory):
        raise ConfigurationError(reason)
    path = directory / SETTINGS_FILE
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigurationError(f"{path}: missing; the broker writes it when it starts") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path}: cannot be read: {error}") from error
    require_plain(plain, str(path))
    folder = _folder(plain, directory)
    plain, told_paths = placed(plain, Path(folder)) if folder else (plain, {})
    if isinstance(plain, dict):
        _bring_up_to_date(plain)
        plain = found_on_hub(plain, str(path), told_paths, fetch=False)
    return validated(plain, str(path)).read_in(folder, told_paths)


def _bring_up_to_date(plain: dict[str, Any]) -> None:
    """An older release wrote all keys of its own. Set those that it did not have to what it did without them, and leave
    those out that are no more."""
    for key in REMOVED:
        section, _, name = key.partition(".")
        values = plain.get(section)
        if isinstance(values, dict):
            values.pop(name, None)
    for key, value in FORMERLY.items():
        section, _, name = key.partition(".")
        values = plain.get(section)
        if isinstance(values, dict):
            values.setdefault(name, value)


def _folder(plain: Any, directory: Path) -> str:
    """Take the folder out of settings.json, "" where that is the working directory. It may have moved with the run."""
    folder = plain.pop(FOLDER, "") if isinstance(plain, dict) else ""
    if not isinstance(folder, str) or not folder:
        return ""
    run = plain.get("run")
    told = str(run.get("directory", "")) if isinstance(run, dict) else ""
    if not os.path.isdir(folder) and is_relative(told):
        # The way from the run's directory to the configuration is still the same.
        way = os.path.relpath(folder, os.path.join(folder, told))
        moved = os.path.abspath(directory / way)
        folder = moved if os.path.isdir(moved) else folder
    return "" if folder == os.getcwd() else folder
