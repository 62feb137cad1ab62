"""The settings as they may be told: to files, logs, cards and trackers. Secrets stay where their owner has put them."""

import re
from collections.abc import Mapping
from typing import Any, Final

from gspo_services.shared.runtime.plain_text import without_passwords
from gspo_services.shared.settings.folder import with_paths
from gspo_services.shared.settings.sections import Settings

HIDDEN: Final = "(hidden)"
_SECRET: Final = re.compile(
    r"(^|_)((api|access|secret|private|auth)_?keys?|tokens?|secrets?|passwords?|passwd|credentials?)$", re.IGNORECASE
)


def told_settings(settings: Settings) -> dict[str, Any]:
    """All settings as plain data, from which settings can be made again.

    Its paths are as the configuration file says them. Without the variables of agents, texts among an environment's options
    whose name is that of a secret, and users, passwords and secret parameters of addresses.
    """
    given = with_paths(settings.model_dump(mode="json"), lambda path: settings.told_paths.get(path, path))
    plain: dict[str, Any] = _without(given, by_name=False)
    plain["environment"] = _without(plain["environment"], by_name=True)
    plain["agent"]["environment"] = dict.fromkeys(plain["agent"]["environment"], HIDDEN)
    return plain


def _without(value: Any, *, by_name: bool) -> Any:
    if isinstance(value, Mapping):
        return {
            name: HIDDEN if by_name and _is_secret(name, each) else _without(each, by_name=by_name)
            for name, each in value.items()
        }
    if isinstance(value, list):
        return [_without(each, by_name=by_name) for each in value]
    return without_passwords(value) if isinstance(value, str) else value


def _is_secret(name: str, value: Any) -> bool:
    return isinstance(value, str) and bool(value) and _SECRET.search(name) is not None
