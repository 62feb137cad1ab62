"""settings.json in the run's directory: the settings with which the run was started last. The broker is its only writer."""

import json
import os
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from services.runtime.errors import ConfigurationError
from services.runtime.settings.configuration import require_plain
from services.runtime.settings.sections import Settings

SETTINGS_FILE: Final = "settings.json"


def write_run_settings(settings: Settings) -> None:
    """Replace the file. Raises: OSError."""
    path = settings.run.directory / SETTINGS_FILE
    partial = path.with_name(f".partial-{path.name}")
    partial.write_text(json.dumps(settings.model_dump(mode="json"), indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)


def read_run_settings(directory: Path) -> Settings:
    """Raises: ConfigurationError when there are none, or those of another release."""
    path = directory / SETTINGS_FILE
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        require_plain(plain, "")
        return Settings.model_validate(plain)
    except FileNotFoundError as error:
        raise ConfigurationError(f"{path}: not there; the broker writes it when it starts") from error
    except (OSError, ValueError, ValidationError, RecursionError) as error:
        raise ConfigurationError(f"{path}: cannot be read: {error}") from error
