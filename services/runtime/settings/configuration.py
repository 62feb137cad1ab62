"""Load a run's settings: TOML file < environment < ``--set section.key=value``. Errors name the key and the way out."""

import difflib
import math
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from services.runtime.errors import ConfigurationError
from services.runtime.settings.sections import Settings

ENVIRONMENT_PREFIX: Final = "GSPO_"
MAX_DEPTH: Final = 32
RESERVED: Final = frozenset({"GSPO_DATA_DIR", "GSPO_LOG_LEVEL"})


def load_settings(path: Path | None, overrides: Sequence[str] = (), environment: Mapping[str, str] = os.environ) -> Settings:
    """Settings from ``path`` (None: the defaults), the environment and ``overrides`` ("section.key=value").

    Raises: ConfigurationError naming the file, the key, the value and the way out.
    """
    plain = _read_toml(path) if path is not None else {}
    origin = str(path) if path is not None else "defaults"
    for name, value in environment.items():
        if name.startswith(ENVIRONMENT_PREFIX) and "__" in name and name not in RESERVED:
            _put(plain, name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__"), _value(value), f"environment {name}")
    for override in overrides:
        _put_override(plain, override)
    return _validated(plain, origin)


def override_settings(settings: Settings, overrides: Sequence[str]) -> Settings:
    """``settings`` with some keys changed. Raises: ConfigurationError as `load_settings` does."""
    plain = settings.model_dump(mode="json")
    for override in overrides:
        _put_override(plain, override)
    return _validated(plain, "--set")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigurationError(f"{path}: no such file; examples are in examples/") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: cannot be read: {error}") from error
    # ValueError: also a number of thousands of digits.
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path}: not valid TOML: {error}") from error


def _put_override(plain: dict[str, Any], override: str) -> None:
    key, separator, value = override.partition("=")
    if not separator:
        raise ConfigurationError(f"--set {override!r}: expected section.key=value, such as batch.max_lag=2")
    _put(plain, key.strip().split("."), _value(value.strip()), f"--set {override}")


def _validated(plain: dict[str, Any], origin: str) -> Settings:
    require_plain(plain, origin)
    try:
        return Settings.model_validate(plain)
    except ValidationError as error:
        lines = [_explain(details) for details in error.errors()]
        raise ConfigurationError(f"{origin}: " + "\n".join(lines)) from error


def require_plain(plain: Any, origin: str, key: str = "", depth: int = 0) -> None:
    """Check that a configuration is data that settings.json can hold: text, numbers, truth values, lists and tables.

    Raises: ConfigurationError naming the key, for dates, numbers of more than 64 bits or none at all, text that is no
    Unicode, and too many levels of tables.
    """
    if depth > MAX_DEPTH:
        raise ConfigurationError(f"{origin}: {key[:100]}: more than {MAX_DEPTH} levels of tables and lists")
    if isinstance(plain, dict):
        for name, value in plain.items():
            require_plain(str(name), origin, "a key", depth)
            require_plain(value, origin, f"{key}.{name}" if key else str(name), depth + 1)
    elif isinstance(plain, list):
        for value in plain:
            require_plain(value, origin, key, depth + 1)
    elif isinstance(plain, str):
        if "\0" in plain or any("\ud800" <= letter <= "\udfff" for letter in plain):
            raise ConfigurationError(f"{origin}: {key[:100]} is {plain[:100]!r}: not text")
    elif isinstance(plain, float):
        if not math.isfinite(plain):
            raise ConfigurationError(f"{origin}: {key[:100]} is {plain}: expected a finite number")
    elif isinstance(plain, int):
        if not -(2**63) <= plain < 2**63:
            raise ConfigurationError(f"{origin}: {key[:100]} is a number of {plain.bit_length()} bits, 64 allowed")
    elif plain is not None:
        raise ConfigurationError(f"{origin}: {key[:100]} is a {type(plain).__name__}: write it as text, in quotes")


def _value(text: str) -> Any:
    """A value as TOML reads it; bare words are strings, so that `--set environment.name=calculator` needs no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def _put(plain: dict[str, Any], keys: Sequence[str], value: Any, origin: str) -> None:
    if len(keys) < 2 or not all(keys):
        raise ConfigurationError(f"{origin}: expected section.key, such as batch.max_lag")
    table = plain
    for key in keys[:-1]:
        inner = table.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigurationError(f"{origin}: {key} is a value, not a section")
        table = inner
    table[keys[-1]] = value


def _explain(details: ErrorDetails) -> str:
    location = [str(part) for part in details["loc"]]
    name = ".".join(location)
    if details["type"] == "extra_forbidden":
        known = _known_keys(location[:-1])
        close = difflib.get_close_matches(location[-1][:64], known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else "known keys: " + ", ".join(known)
        return f"  {name}: unknown key; {hint}"
    message = details["msg"].removeprefix("Value error, ")
    if details["type"] == "value_error":
        return f"  {message}"  # from a section's own check, which names its keys
    return f"  {name} is {repr(details['input'])[:200]}: {message}"


def _known_keys(location: Sequence[str]) -> list[str]:
    model: type[BaseModel] = Settings
    for part in location:
        annotation = model.model_fields[part].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return sorted(model.model_fields)


def require_model(path: Path) -> None:
    """Raises: ConfigurationError when ``path``, the setting model.path, is not a Hugging Face model directory."""
    if not (path / "config.json").is_file():
        raise ConfigurationError(
            f"model.path is {path}: no config.json there. It must be a Hugging Face model directory; a relative path starts "
            f"at the working directory; `gspo model tiny {path}` makes a small model"
        )
