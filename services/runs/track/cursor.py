"""RUN/trackers/NAME.json: the tracker's run for this run, and how much of metrics.jsonl it has."""

import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from gspo.files import replace_file
from gspo_services.shared.runtime.errors import OccupiedError, ServiceError

DIRECTORY: Final = "trackers"


class Cursor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far one tracker has come."""

    tracker_run: str
    """The name of this run at the tracker, for good."""
    run_id: str = ""
    """The run whose lines these are; empty while its ledger does not say."""
    line: int = 0
    """The last line that it has."""
    behind: int = 0
    """Lines that it lacked when this was written."""
    error: str = ""
    """Why it gets nothing; empty while it does."""


class CursorFile:
    """The cursor's file; only the process that has locked it writes it."""

    def __init__(self, directory: Path, name: str) -> None:
        """``directory``: the run's."""
        self.path = directory / DIRECTORY / f"{name}.json"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the file. Raises: OccupiedError when another process holds it; ServiceError when it cannot be written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise OccupiedError(
                    f"another process already sends this run to {self.path.stem}: wait until it has ended, or end it"
                ) from error
            yield
        finally:
            os.close(descriptor)

    def read(self) -> Cursor | None:
        """Read the cursor; None when nothing was sent yet. Raises: ValueError when it is damaged."""
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=Cursor)
        except FileNotFoundError:
            return None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ValueError(f"{self.path} is damaged: {error}") from error

    def write(self, cursor: Cursor) -> None:
        """Replace it, durably. Raises: OSError."""
        replace_file(self.path, json.dumps(msgspec.to_builtins(cursor), indent=2) + "\n")

    def _unwritable(self, error: OSError) -> ServiceError:
        return ServiceError(
            f"{self.path.parent} cannot be written ({error.strerror}), but the notes of what was sent are kept there: make "
            "it writable and make room, or send a copy of the run's directory"
        )

    def put_away(self) -> Path:
        """Rename a damaged file, so that a person can look at it."""
        return self.path.replace(self.path.with_suffix(f".damaged-{secrets.token_hex(2)}"))


def new_tracker_run(run_name: str) -> str:
    """Make a name that no other run of the tracker has."""
    plain = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in run_name)[:40]
    return f"{plain or 'run'}-{secrets.token_hex(4)}"
