"""A pytest plugin: which worker of ``pytest -n N --dist loadfile`` runs which tests, and in which order.

A module's tests run in one worker, which makes the module's fixtures once. Modules that share an expensive fixture of the
session run in one worker, too. What takes longest begins first, so that no worker is left with it at the end.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.workers.groups import group_of

FIRST = ("tests/integration/", "tests/simulation/", "tests/unit/setup/", "tests/unit/docs/")
"""Folders whose modules take longest, in this order: they start processes, play whole runs or make environments."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getvalue("dist") != "loadfile":
        return None
    from tests.support.workers.scheduler import ByGroup  # Only here: not every environment of the tests has xdist.

    return ByGroup(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a worker only: a session without workers keeps the order of the files."""
    if hasattr(config, "workerinput"):
        items.sort(key=_rank)


def _rank(item: pytest.Item) -> int:
    if group_of(item.path) is not None:
        return 0
    return next((place for place, folder in enumerate(FIRST, 1) if item.nodeid.startswith(folder)), len(FIRST) + 1)
