"""Which settings say where a run is made, and not how it trains: addresses, ports, directories, keys."""

from collections.abc import Iterator
from typing import Any

_PLACES = frozenset({"run.directory", "run.max_restarts", "run.log_bytes", "run.log_files", "agent.environment"})
_SECTIONS = frozenset({"security"})
_ENDS = ("endpoint", "port", "host", "url", "address", "node_rank")


def is_place(section: str, key: str) -> bool:
    """Return whether a setting may differ between two runs of one kind, on other machines or at other times."""
    return section in _SECTIONS or f"{section}.{key}" in _PLACES or key.endswith(_ENDS)


def training_settings(plain: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Section, key and value of every setting that is no place. ``plain``: settings as tables of plain values."""
    for section, table in plain.items():
        if isinstance(table, dict):
            yield from ((section, key, value) for key, value in table.items() if not is_place(section, key))
