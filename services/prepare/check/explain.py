"""``gspo check --settings`` and ``--explain``: the values of a configuration, where each comes from, and what it means."""

import json
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.runtime.plain_text import one_line
from gspo_services.shared.settings import (
    REMOVED,
    RENAMED,
    Configuration,
    Key,
    all_keys,
    close_match,
    key_names,
    load_configuration,
    purpose,
    section_names,
    value_text,
)

MIN_WIDTH: Final = 40


def check_command(config: Path, overrides: Sequence[str], explained: Sequence[str] | None) -> int:
    """Print all values as JSON; or explain these keys and sections, all for an empty list. Returns the exit status.

    Raises: ConfigurationError for a configuration that is not good, and for keys that do not exist.
    """
    configuration = load_configuration(config, overrides)
    if explained is None:
        sys.stdout.write(_as_json(configuration) + "\n")
        return 0
    width = max(MIN_WIDTH, shutil.get_terminal_size().columns)
    sys.stdout.write("\n".join(explanation(configuration, explained, width)) + "\n")
    return 0


def _as_json(configuration: Configuration) -> str:
    """The settings; other letters than ASCII's are escaped where one of them could act on a terminal."""
    text = configuration.settings.model_dump_json(indent=2)
    return text if text.replace("\n", "").isprintable() else json.dumps(json.loads(text), indent=2)


def explanation(
    configuration: Configuration, words: Sequence[str], width: int, renamed: Mapping[str, str] = RENAMED
) -> Iterator[str]:
    """Lines of at most ``width`` characters about keys and sections; about everything without ``words``."""
    plain = configuration.settings.model_dump(mode="json")
    chosen = [key for word in (words or section_names()) for key in _keys_of(word, renamed)]
    previous = ""
    for key in dict.fromkeys(chosen):
        section, _, name = key.partition(".")
        if section != previous:
            yield from _wrapped(f"[{section}] {purpose(section)}", width)
            yield ""
            previous = section
        source = configuration.sources.get(key, "default")
        yield from _explained(all_keys()[key], value_text(plain[section][name]), source, width)
        yield ""


def _keys_of(word: str, renamed: Mapping[str, str]) -> list[str]:
    """The keys that a word names: one, or those of a section. Raises: ConfigurationError with the closest one."""
    if word in all_keys():
        return [word]
    if word in section_names():
        return [f"{word}.{name}" for name in key_names(word)]
    if word in renamed:
        raise ConfigurationError(f"--explain {word}: the key is called {renamed[word]} now")
    if word in REMOVED:
        raise ConfigurationError(f"--explain {word}: {REMOVED[word]}")
    section, _, name = word.partition(".")
    if name and section in section_names():
        raise ConfigurationError(f"--explain {word[:100]}: unknown key; {close_match(name, key_names(section))}")
    hint = close_match(word, [*all_keys(), *section_names()], otherwise=section_names())
    raise ConfigurationError(f"--explain {word[:100]}: unknown key or section; {hint}")


def _explained(key: Key, value: str, source: str, width: int) -> Iterator[str]:
    yield from _wrapped(f"{key.name} = {value}", width)
    for label, text in (("from", source), ("default", value_text(key.default)), ("type", key.type)):
        yield from _wrapped(f"    {label + ':':<9}{text}", width, indent=13)
    yield from _wrapped("    " + key.meaning.replace("``", "`"), width, indent=4)


def _wrapped(text: str, width: int, indent: int = 4) -> list[str]:
    return textwrap.wrap(one_line(text, sys.maxsize), width, subsequent_indent=" " * indent, break_on_hyphens=False)
