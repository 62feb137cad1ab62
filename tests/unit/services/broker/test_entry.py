"""Where the broker's tasks come from."""

from typing import Any

import pytest

from services.broker.entry import tasks_of
from services.runtime.errors import ConfigurationError
from services.runtime.settings.configuration import validated


def settings_of(environment: str, **agent: str) -> Any:
    return validated({"environment": {"name": environment}, "agent": agent}, "test")


def test_an_agent_needs_only_tasks() -> None:
    for name in ("shop", "arithmetic"):
        assert set(tasks_of(settings_of(name, function="a:solve"))) == {"train", "eval"}


def test_without_an_agent_tasks_alone_are_refused_before_anything_is_written() -> None:
    assert set(tasks_of(settings_of("arithmetic"))) == {"train", "eval"}
    with pytest.raises(ConfigurationError, match=r'"shop" has tasks and nothing that plays them: name an agent'):
        tasks_of(settings_of("shop"))
