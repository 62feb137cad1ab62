"""settings.json in the run's directory: the settings with which the run was last started. Only the broker writes it."""

import json
import os
from pathlib import Path
from typing import Any, Final

from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings.configuration import validated
from gspo_services.shared.settings.sections import Settings

SETTINGS_FILE: Final = "settings.json"
_FORMER: Final = (("rollout", "weights_path"), ("learner", "weights_group_backend"))


def write_run_settings(settings: Settings) -> None:
    """Replace the file. Raises: OSError."""
    path = settings.ledger_directory / SETTINGS_FILE
    partial = path.with_name(f".partial-{path.name}")
    partial.write_text(json.dumps(settings.model_dump(mode="json"), indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)


def read_run_settings(directory: Path) -> Settings:
    """The settings with which a run was last started.

    Raises: ConfigurationError when they are missing, or are not settings of this release.
    """
    path = directory / SETTINGS_FILE
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigurationError(f"{path}: not there; the broker writes it when it starts") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path}: cannot be read: {error}") from error
    _drop_former(plain)
    _drop_unused_mode(plain)
    return validated(plain, str(path))


def _drop_former(plain: Any) -> None:
    """Leave out settings that there were once, and that say nothing about what the run did: its record stays readable."""
    for section, key in _FORMER:
        match plain:
            case dict() if isinstance(plain.get(section), dict):
                plain[section].pop(key, None)


def _drop_unused_mode(plain: Any) -> None:
    """Leave out the mismatch mode that a recorded run with the behaviour anchor never applied. A configuration that asks
    for one is refused; the record of a run that ignored it must stay readable, to audit or replay it."""
    match plain:
        case {"objective": {"anchor": "behaviour", "mismatch_mode": "truncate" | "reject"} as objective}:
            del objective["mismatch_mode"]
