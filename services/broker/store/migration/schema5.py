"""What a ledger of schema 5 has not, and this release's has: it lies in settings.json, which its broker wrote beside it."""

import json
from pathlib import Path
from typing import Any

from services.runtime.settings import SETTINGS_FILE, fingerprint_of_plain


class FormerRun:
    """The settings that held for the whole run until now, as JSON."""

    def __init__(self, directory: Path) -> None:
        """Raises: ValueError when the file is not there or is none of a run."""
        path = directory / SETTINGS_FILE
        try:
            self._plain = json.loads(path.read_text(encoding="utf-8"))
            sampling = self._plain["sampling"]
            whole = sampling["max_episode_tokens"]
            most = sampling["max_tokens"]
            self._sampling = [sampling["temperature"], sampling["max_turn_tokens"], most, most if whole is None else whole]
            self._fingerprints = [fingerprint_of_plain(self._plain, with_sampling=former) for former in (True, False)]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(
                f"its groups were sampled as {path} says, which cannot be read ({type(error).__name__}: {error})"
            ) from error

    def filled(self, table: str, plain: dict[str, Any]) -> dict[str, Any]:
        """The row with what it lacks. All groups were sampled alike, and nothing was scheduled."""
        if table == "groups":
            return {**plain, "sampling": self._sampling}
        if table == "batches":
            return {**plain, "samplings": [self._sampling] * len(plain["group_ids"]), "values": {}}
        return plain

    def fingerprint(self, found: str) -> str:
        """The run's fingerprint in this release, which leaves sampling out; ``found`` where it is of other settings."""
        former, now = self._fingerprints
        return now if found == former else found
