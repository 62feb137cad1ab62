"""settings.json in the run's directory: the settings of the run's last start, as told. Only the broker writes it."""

import json
import os
from pathlib import Path
from typing import Final

from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings.configuration import validated
from gspo_services.shared.settings.sections import Settings
from gspo_services.shared.settings.told import told_settings

SETTINGS_FILE: Final = "settings.json"


def write_run_settings(settings: Settings) -> None:
    """Replace the file. Raises: OSError."""
    path = settings.ledger_directory / SETTINGS_FILE
    partial = path.with_name(f".partial-{path.name}")
    partial.write_text(json.dumps(told_settings(settings), indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)


def read_run_settings(directory: Path) -> Settings:
    """Read the settings of a run's last start.

    Raises: ConfigurationError when they are missing, or are not settings of this release.
    """
    path = directory / SETTINGS_FILE
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigurationError(f"{path}: missing; the broker writes it when it starts") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path}: cannot be read: {error}") from error
    return validated(plain, str(path))
