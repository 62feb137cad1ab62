"""The sandbox in which a rollout runs the programs of its policy."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gspo.tasks.environments import TaskSet
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings import SandboxSection
from gspo_services.tasks.sandbox import Sandboxes, open_configured


@asynccontextmanager
async def open_sandbox(section: SandboxSection, environment: TaskSet) -> AsyncIterator[Sandboxes | None]:
    """The configured sandbox for an environment that scores programs; None for any other.

    Raises: ConfigurationError that says what to do where programs cannot be isolated, or a server refuses.
    """
    if not any(probe.grader for probe in environment.reward_probes):
        yield None
        return
    opened = False
    try:
        async with open_configured(section) as sandboxes:
            opened = True
            yield sandboxes
    except ConfigurationError as error:
        raise error if opened else type(error)(f"the environment runs programs of the policy: {error}") from error
