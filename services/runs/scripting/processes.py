"""The ``gspo`` command as a child of a script or notebook."""

import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.runtime.lifecycle import module_command

COMMAND: Final = "gspo_services.cli.main"
LOG: Final = "gspo-run.log"
_STOP_S: Final = 60.0
_TAIL_LINES: Final = 20


def overrides_of(overrides: Mapping[str, Any] | Sequence[str]) -> list[str]:
    """Format overrides as ``--set`` takes them. ``overrides``: values by "section.key", or texts like "batch.max_lag=0".

    Raises: ConfigurationError for a value that TOML cannot hold.
    """
    if not isinstance(overrides, Mapping):
        return [str(each) for each in overrides]
    return [f"{key}={_toml(key, value)}" for key, value in overrides.items()]


def _toml(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | Path):
        return _quoted(str(value))
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(key, each) for each in value)}]"
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{_quoted(str(name))} = {_toml(key, each)}' for name, each in value.items())} }}"
    raise ConfigurationError(
        f"{key} is {value!r:.100}, a {type(value).__name__}: give text, a number, a truth value or a list"
    )


def _quoted(text: str) -> str:
    escaped = "".join(_escape(letter) for letter in text)
    return f'"{escaped}"'


def _escape(letter: str) -> str:
    if letter in '"\\':
        return "\\" + letter
    return letter if letter.isprintable() else f"\\U{ord(letter):08x}"


def start_run(config: Path, overrides: Sequence[str], directory: Path) -> subprocess.Popen[bytes]:
    """Start ``gspo run`` in a new session: an interrupt of the script, or of a notebook's cell, does not reach it."""
    words = [str(config), *(word for override in overrides for word in ("--set", override)), "--plain"]
    try:
        log_path(directory).parent.mkdir(parents=True, exist_ok=True)
        with log_path(directory).open("ab") as log:
            return subprocess.Popen(
                module_command(COMMAND, "run", *words),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
    except OSError as error:
        raise ConfigurationError(f"{directory}: the run cannot be started there: {error}") from error


def log_path(directory: Path) -> Path:
    """Return the log of what ``gspo run`` prints when a script starts it."""
    return directory / "logs" / LOG


def ask_to_stop(directory: Path, reason: str) -> str:
    """Run ``gspo stop``. Returns why it failed; empty when the run is stopping."""
    # A process: a notebook already has an event loop in this thread.
    try:
        done = subprocess.run(
            module_command(COMMAND, "stop", str(directory), "--reason", reason),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_STOP_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"gspo stop {directory}: no answer within {_STOP_S:.0f} s"
    return "" if done.returncode == 0 else (done.stderr.strip() or f"gspo stop ended with status {done.returncode}")


def interrupt(process: subprocess.Popen[bytes]) -> None:
    """Act like Ctrl-C in a terminal: the run finishes its batch, saves, and ends; the same command continues it."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)


def last_lines(path: Path) -> str:
    """Return the end of a log."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 65536))
            lines = file.read().decode(errors="replace").rstrip("\n").split("\n")
    except OSError as error:
        return f"its log cannot be read: {error.strerror}"
    return "\n".join(lines[-_TAIL_LINES:])
