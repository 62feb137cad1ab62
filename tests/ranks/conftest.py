"""Four processes on what may be two cores: only where `-m` asks for `ranks`."""

from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ranks: the learner on four ranks, about two minutes")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return None if "ranks" in config.getoption("-m") else True
