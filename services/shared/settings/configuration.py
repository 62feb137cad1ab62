"""Load a run's settings: TOML file < environment < ``--set section.key=value``. Errors name the key and what to do."""

import math
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from gspo.model_files.configuration import read_config
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.runtime.foreign import belongs_to_model
from gspo_services.shared.runtime.paths import way_to_model
from gspo_services.shared.runtime.user_modules import USERS_FOLDER
from gspo_services.shared.settings.folder import placed, with_paths
from gspo_services.shared.settings.hub import SCHEME, local_path
from gspo_services.shared.settings.keys import REMOVED, RENAMED, close_match, names_in
from gspo_services.shared.settings.sections import Settings

ENVIRONMENT_PREFIX: Final = "GSPO_"
MAX_DEPTH: Final = 32
RESERVED: Final = frozenset({"GSPO_DATA_DIR", "GSPO_LOG_LEVEL", "GSPO_SANDBOX_KEY"})


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """Settings, and the source of each value that is not the default."""

    settings: Settings
    sources: Mapping[str, str]
    """By section.key: the file's path, "environment NAME" or "--set KEY=VALUE"; several, if each set a part."""


@dataclass
class _Given:
    """The values given so far, and their sources."""

    plain: dict[str, Any]
    sources: dict[str, str] = field(default_factory=dict)

    def put(self, keys: Sequence[str], value: Any, origin: str) -> None:
        """Set one value, which replaces what came before. Raises: ConfigurationError."""
        if len(keys) < 2 or not all(keys):
            raise ConfigurationError(f"{origin}: expected section.key, such as batch.max_lag")
        table = self.plain
        for key in keys[:-1]:
            inner = table.setdefault(key, {})
            if not isinstance(inner, dict):
                raise ConfigurationError(f"{origin}: {key} is a value, not a section")
            table = inner
        table[keys[-1]] = value
        name = ".".join(keys[:2])
        before = self.sources.get(name)
        self.sources[name] = f"{before}, {origin}" if before and len(keys) > 2 else origin


def load_settings(
    path: Path | None, overrides: Sequence[str] = (), environment: Mapping[str, str] = os.environ, *, fetch: bool = False
) -> Settings:
    """Load settings from ``path`` (None: the defaults), the environment and ``overrides`` ("section.key=value").

    ``fetch``: bring models and data sets that are named ``hf://...`` from the Hugging Face hub.

    Raises: ConfigurationError naming the file, the key, the value and what to do.
    """
    return load_configuration(path, overrides, environment, fetch=fetch).settings


def load_configuration(
    path: Path | None,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] = os.environ,
    *,
    renamed: Mapping[str, str] = RENAMED,
    fetch: bool = False,
) -> Configuration:
    """Load settings, with the source of each value. ``renamed``: new names of keys by their old ones. ``fetch``: as
    ``load_settings`` has it.

    Raises: ConfigurationError as ``load_settings`` does.
    """
    origin = str(path) if path is not None else "defaults"
    read = {} if path is None else _read_toml(path)
    require_plain(read, origin)
    folder = Path() if path is None else _folder_of(path)
    plain, told_paths = (read, {}) if folder == Path() else placed(read, folder)
    given = _Given(plain, {f"{section}.{key}": origin for section, table in read.items() for key in _keys(table)})
    for name, value in environment.items():
        if name.startswith(ENVIRONMENT_PREFIX) and "__" in name and name not in RESERVED:
            keys = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
            given.put(keys, _value(value), f"environment {name}")
    for override in overrides:
        _put_override(given, override)
    if path is not None:
        # Worker processes find the user's modules there, too.
        os.environ[USERS_FOLDER] = os.path.abspath(folder)
    settings = validated(found_on_hub(given.plain, origin, told_paths, fetch=fetch), origin, given.sources, renamed)
    settings = settings.read_in("" if folder == Path() else str(folder), told_paths)
    return Configuration(settings=settings, sources=given.sources)


def found_on_hub(plain: Mapping[str, Any], origin: str, told_paths: dict[str, str], *, fetch: bool) -> dict[str, Any]:
    """Put paths of the hub's cache in place of ``hf://...``, and note in ``told_paths`` what was said.

    Raises: ConfigurationError when one cannot be had that is to be fetched, and as ``require_plain`` does.
    """
    require_plain(plain, origin)

    def find(text: str) -> str:
        if not text.startswith(SCHEME):
            return text
        path = local_path(text, fetch=fetch)
        # A path has no two slashes in a row.
        told_paths[os.path.normpath(path)] = text
        return path

    return with_paths(plain, find)


def _keys(table: Any) -> Iterable[str]:
    return table if isinstance(table, dict) else ()


def _folder_of(path: Path) -> Path:
    """The folder that a configuration lies in, empty where that is the working directory."""
    folder = path.parent
    return Path() if os.path.abspath(folder) == os.getcwd() else folder


def override_settings(settings: Settings, overrides: Sequence[str]) -> Settings:
    """Return ``settings`` with some keys changed. Raises: ConfigurationError as ``load_settings`` does."""
    given = _Given(settings.model_dump(mode="json"))
    for override in overrides:
        _put_override(given, override)
    told_paths = dict(settings.told_paths)
    plain = found_on_hub(given.plain, "--set", told_paths, fetch=False)
    return validated(plain, "--set", given.sources).read_in(settings.folder, told_paths)


def _read_toml(path: Path) -> dict[str, Any]:
    # A pipe gives its text to the first process that reads it, and nothing, which are the defaults, to the next.
    if str(path) == "-" or path.parts[:3] in (("/", "dev", "stdin"), ("/", "dev", "fd")) or path.parts[:2] == ("/", "proc"):
        raise ConfigurationError(f"{path}: each process of a run reads its configuration: save it as a file, and name that")
    try:
        # Editors of Windows write a byte-order mark first.
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise ConfigurationError(f"{path}: no such file; examples are in examples/") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error}; save it as UTF-8") from error
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error}") from error
    # ValueError also covers a number of thousands of digits.
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path}: not valid TOML: {error}") from error


def _put_override(given: _Given, override: str) -> None:
    key, separator, value = override.partition("=")
    if not separator:
        raise ConfigurationError(f"--set {override!r}: expected section.key=value, such as batch.max_lag=2")
    given.put(key.strip().split("."), _value(value.strip()), f"--set {override}")


def validated(plain: Any, origin: str, sources: Mapping[str, str] = {}, renamed: Mapping[str, str] = RENAMED) -> Settings:
    """Make settings from tables of plain values. ``sources`` of single keys are named if they differ from ``origin``.

    Raises: ConfigurationError naming the origin, and each wrong key with its value and what to do.
    """
    require_plain(plain, origin)
    _require_new_names(plain, origin, sources, renamed)
    try:
        return Settings.model_validate(plain)
    except ValidationError as error:
        lines = [_explain(details, origin, sources) for details in error.errors()]
        raise ConfigurationError(f"{origin}: " + "\n".join(lines)) from error


def _require_new_names(plain: Any, origin: str, sources: Mapping[str, str], renamed: Mapping[str, str]) -> None:
    """Raises: ConfigurationError with each key that was renamed or removed, its value, where it is set, and what to do."""
    lines = []
    what_to_do = {old: f"the key is now called {new}" for old, new in renamed.items()} | dict(REMOVED)
    for old, text in what_to_do.items():
        section, _, key = old.partition(".")
        table = plain.get(section) if isinstance(plain, dict) else None
        if isinstance(table, dict) and key in table:
            lines.append(f"{sources.get(old, origin)[:200]}: {old} is {repr(table[key])[:200]}: {text}")
    if lines:
        raise ConfigurationError("\n".join(lines))


def require_plain(plain: Any, origin: str, key: str = "", depth: int = 0) -> None:
    """Check that a configuration is data that settings.json can hold: text, numbers, truth values, lists and tables.

    Raises: ConfigurationError naming the key, for dates, numbers of more than 64 bits, NaN or infinity, text that is not
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
    """Parse a value as TOML; bare words are strings, so ``--set environment.name=calculator`` needs no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def _explain(details: ErrorDetails, origin: str, sources: Mapping[str, str]) -> str:
    location = [str(part) for part in details["loc"]]
    name = ".".join(location)
    source = sources.get(".".join(location[:2]), origin)
    said_by = "" if source == origin else f" ({source[:200]})"
    if details["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"  {name}: unknown key{said_by}; {close_match(location[-1], names_in(location))}"
    message = details["msg"].removeprefix("Value error, ")
    if details["type"] == "value_error":
        return f"  {message}{said_by}"  # A section's own check, which names its keys.
    if details["type"] == "dataclass_type":
        message = "Input should be a table of keys"
    return f"  {name} is {repr(details['input'])[:200]}{said_by}: {message}"


def require_model(path: Path) -> None:
    """Raises: ConfigurationError when ``path``, the setting model.path, is not a Hugging Face model directory."""
    if not (path / "config.json").is_file():
        raise ConfigurationError(
            f"model.path is {path}: there is no config.json. It must be a Hugging Face model directory; a relative path "
            f"starts at the folder of the configuration file; {way_to_model(path)}"
        )
    # An export copies them: better said now than when the run has ended.
    for file in path.iterdir():
        if file.is_symlink() and file.suffix != ".safetensors" and file.is_file() and not belongs_to_model(file, path):
            raise ConfigurationError(
                f"model.path is {path}: {file.name} is a link out of it, and would be published with exports: copy the file "
                "there, or remove it"
            )


def model_config(directory: Path) -> dict[str, Any]:
    """Read a model's config.json, of its text model (``gspo.model_files.text_model``). Raises: ConfigurationError."""
    try:
        return read_config(directory)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
