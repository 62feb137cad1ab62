"""The marker of the tests that take longer than the default suite may."""

import pytest

MARKER = "faults: faults injected into whole runs of real processes, run by `make test-faults`"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """They run when they are asked for by name of the marker."""
    if "faults" in config.getoption("markexpr"):
        return
    for item in items:
        if item.get_closest_marker("faults") is not None:
            item.add_marker(pytest.mark.skip(reason="run by `make test-faults`"))
