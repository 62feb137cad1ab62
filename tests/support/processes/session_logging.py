"""A pytest plugin: a test after which this process logs otherwise fails, and the tests behind it do not.

Tests that read what is logged would find nothing, far from the test that is to blame.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog

KEPT = ("wrapper_class", "logger_factory", "cache_logger_on_first_use")
"""``capture_logs`` puts back the rest itself, as another list of the same processors."""


@pytest.fixture(autouse=True)
def session_logging() -> Iterator[None]:
    """The session's logging, which a test leaves as it is."""
    before = structlog.get_config()
    yield
    after = structlog.get_config()
    if changed := [name for name in KEPT if after[name] is not before[name]]:
        structlog.configure(**before)
        structlog.contextvars.clear_contextvars()
        pytest.fail(f"This test has changed how the tests' own process logs: {', '.join(changed)}.")
