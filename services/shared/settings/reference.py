"""The page of all settings: ``make docs-settings`` writes it to docs/settings.md."""

import inspect
import re
import sys
from pathlib import Path
from typing import Final

from gspo_services.shared.settings.keys import (
    TABLES,
    Key,
    all_keys,
    key_names,
    purpose,
    section_names,
    table_keys,
    value_text,
)
from gspo_services.shared.settings.readers import readers

ROOT: Final = Path(__file__).resolve().parents[3]

HEAD: Final = """\
# Settings

Every key of a configuration file. This page is generated from the code: `make docs-settings`.
[models-and-gpus.md](guide/models-and-gpus.md#the-file) explains how to configure a run. `gspo check CONFIG --explain` shows
the same for one configuration, with its values and the source of each. A relative path in a configuration starts at the
folder of the file, one of `--set` and of the environment at the working directory.

"Read by" names the processes that use a key; "commands" are the other `gspo` commands, such as `gspo run` and `gspo replay`.
"""


def reference(root: Path) -> str:
    """Return the page as Markdown, for the sources below ``root``."""
    read_by = readers(root)
    parts = [HEAD]
    for section in section_names():
        rows = [_row(all_keys()[f"{section}.{name}"], read_by[f"{section}.{name}"]) for name in key_names(section)]
        table = "\n".join(["| key | type | default | read by | meaning |", "|---|---|---|---|---|", *rows])
        parts.append(f"## `[{section}]`\n\n{_markdown(purpose(section))}\n\n{table}\n")
        parts += [_inner(table) for table in TABLES if table.startswith(f"{section}.")]
    return "\n".join(parts)


def _inner(table: str) -> str:
    """Tabulate the keys of a table whose inner tables have names that the user chooses."""
    rows = [_cells(key, "as the table") for key in table_keys(table).values()]
    head = "| key | type | default | read by | meaning |\n|---|---|---|---|---|"
    text = inspect.cleandoc(TABLES[table].__doc__ or "")
    return f"### `[{table}.NAME]`\n\n{_markdown(text)}\n\n" + "\n".join([head, *rows]) + "\n"


def _row(key: Key, read_by: tuple[str, ...]) -> str:
    return _cells(key, ", ".join(read_by) or "none")


def _cells(key: Key, read_by: str) -> str:
    default = "not set" if key.default is None else f"`{value_text(key.default)}`"
    cells = (f"`{key.name}`", re.sub(r'("[^"]*")', r"`\1`", key.type), default, read_by, key.meaning)
    return "| " + " | ".join(_markdown(cell).replace("|", r"\|") for cell in cells) + " |"


def _markdown(text: str) -> str:
    """Turn double backticks into single ones, and pages of the documentation into links."""
    return re.sub(r"\bdocs/([\w/-]+\.md)", r"[\1](\1)", text.replace("``", "`"))


if __name__ == "__main__":
    sys.stdout.write(reference(ROOT))
