"""How many processes run the user's code, and what each may use."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Final

import msgspec

import gspo_services.tasks.worker
from gspo_services.tasks.reward_worker.isolation import worker_environment

WORKER_FILE: Final = Path(gspo_services.tasks.worker.__file__).with_name("main.py")
Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]


class ProcessLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one process may use; None leaves a limit as the system has it."""

    memory_bytes: Annotated[int, msgspec.Meta(ge=128 * 1024 * 1024)] | None = 8 * 1024**3
    """Address space, libraries included."""
    cpu_s: Positive | None = 600
    """CPU seconds of a program, or of a worker since its last episode began."""
    file_bytes: Annotated[int, msgspec.Meta(ge=0)] | None = 1024**3
    """The size of a file that it writes."""
    open_files: Annotated[int, msgspec.Meta(ge=64)] | None = 4096
    processes: Positive | None = None
    """Processes and threads of this user, all of them: a limit for users of their own. It does not bind root."""


class UserProcessOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What holds for every process that runs the user's code."""

    limits: ProcessLimits = ProcessLimits()
    environment: dict[str, str] = {}
    """Variables for the user's code. Of ours it gets only those that an interpreter needs, and no token or key."""
    scratch: bool = True
    """Give each process a folder for its files, removed when it ends: TMPDIR, HOME and GSPO_SCRATCH. Without it no file can
    be written."""
    weights: dict[str, float] | None = None
    """Weights of the reward's components; each must then be there. None: the sum of all components."""


class AgentPoolOptions(UserProcessOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Workers for an agent that is a Python function."""

    num_workers: Annotated[int, msgspec.Meta(ge=1, le=256)] = 2
    episodes_per_worker: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 128
    """Episodes that share one worker's event loop. All of them end with it, whichever of them ended it."""
    python: str | None = None
    """The interpreter, 3.10 or later; it needs neither this package nor others. None: the one that runs this process."""
    start_timeout_s: Seconds = 120.0
    """The limit for a worker to start and import the agent."""
    heartbeat_s: Seconds = 1.0
    hang_s: Seconds = 10.0
    """A worker is killed when its event loop has not turned for this long: an async agent must not block. Time without a
    processor, and of imports, is not counted."""
    grace_s: Seconds = 5.0
    """How long an episode may take to end after its deadline or its cancellation, before its worker is killed."""
    max_episodes_per_worker: Positive = 10_000
    """A worker is replaced after this many episodes, so that what its code leaks does not pile up."""
    output_chars: Positive = 64 * 1024
    """Characters that are kept of what one episode prints."""


@asynccontextmanager
async def user_environment(options: UserProcessOptions, *, own_python: bool) -> AsyncIterator[dict[str, str]]:
    """The variables of a process that runs the user's code; its scratch folder is there as long as the context."""
    environment = worker_environment(os.environ)
    if own_python:
        # They describe our Python: another one would load packages that were built for ours.
        environment = {name: value for name, value in environment.items() if name not in _OF_OUR_PYTHON}
    environment |= options.environment
    if not options.scratch:
        yield environment
        return
    async with temporary_folder() as folder:
        scratch = str(folder)
        yield {"TMPDIR": scratch, "GSPO_SCRATCH": scratch, **environment, "HOME": options.environment.get("HOME", scratch)}


@asynccontextmanager
async def temporary_folder() -> AsyncIterator[Path]:
    """A folder that only this user can enter, removed at the end with all that is in it."""
    folder = Path(tempfile.mkdtemp(prefix="gspo-user-"))
    try:
        yield folder
    finally:
        # In a thread: the user's code may have left a hundred thousand files.
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def process_limits(options: UserProcessOptions) -> Mapping[str, int | None]:
    """The limits as the worker takes them."""
    limits: dict[str, int | None] = msgspec.structs.asdict(options.limits)
    return limits if options.scratch else {**limits, "file_bytes": 0}


def worker_command(python: str, settings: str) -> list[str]:
    """The command line of ``services/tasks/worker``; ``settings`` is JSON."""
    return [python, str(WORKER_FILE), settings]


_OF_OUR_PYTHON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
