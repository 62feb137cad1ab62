"""The sandbox that a configuration names: on this machine, or on servers."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from gspo_services.shared.runtime.errors import ConfigurationError, UnprovenError
from gspo_services.shared.settings import SandboxSection
from gspo_services.tasks.sandbox.interface import ProgramRefused, Sandboxes, SandboxNotStarted, SandboxUnavailable
from gspo_services.tasks.sandbox.local import PYTHON, LocalOptions, LocalSandboxes
from gspo_services.tasks.sandbox.wire import KEY_VARIABLE

if TYPE_CHECKING:
    from gspo_services.tasks.sandbox.remote import RemoteSandboxes


@asynccontextmanager
async def open_configured(section: SandboxSection, environment: Mapping[str, str] = os.environ) -> AsyncIterator[Sandboxes]:
    """The sandbox of the section ``[sandbox]``, until the end of the block.

    Raises: ConfigurationError with the way out, where programs cannot be separated or a server refuses.
    """
    sandboxes = _chosen(section, environment)
    try:
        async with sandboxes.opened():
            yield sandboxes
    except (SandboxUnavailable, ProgramRefused) as error:
        raise unusable(error) from error


def unusable(error: SandboxUnavailable | ProgramRefused) -> ConfigurationError:
    """The error for people, of a sandbox that was opened."""
    return (UnprovenError if isinstance(error, SandboxNotStarted) else ConfigurationError)(str(error))


def _chosen(section: SandboxSection, environment: Mapping[str, str]) -> LocalSandboxes | RemoteSandboxes:
    if not section.urls:
        return LocalSandboxes(local_options(section))
    # Its HTTP client is not in every image: the broker's has none.
    from gspo_services.tasks.sandbox import remote

    options = remote.RemoteOptions(
        urls=section.urls, key=environment.get(KEY_VARIABLE, ""), acquire_timeout_s=section.acquire_timeout_s
    )
    return remote.RemoteSandboxes(options)


def local_options(section: SandboxSection) -> LocalOptions:
    """What sandboxes of this machine have. Raises: ConfigurationError for an interpreter or a folder that is not there."""
    python = Path(section.python) if section.python else PYTHON
    if not os.access(python, os.X_OK):
        raise ConfigurationError(f"sandbox.python is {python}: no program is there; install it, or leave the setting empty")
    read_only = [Path(folder) for folder in section.read_only]
    for folder in read_only:
        if not folder.is_dir():
            raise ConfigurationError(f"sandbox.read_only holds {folder}: no such folder; create it, or leave it out")
    return LocalOptions(max_sandboxes=max_sandboxes_of(section), warm=section.warm, python=python, read_only=read_only)


def max_sandboxes_of(section: SandboxSection) -> int:
    """Sandboxes at a time: as many as there are processors, where the section does not say."""
    return section.max_sandboxes or len(os.sched_getaffinity(0))
