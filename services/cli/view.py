"""``gspo view RUN_DIR...``: serve a page with recorded runs for the browser."""

import asyncio
import ipaddress
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gspo_services.runs.view import LearnerNumbers, PageAnswers, ViewServer, serve_until, watched_runs
from gspo_services.shared.runtime.clock import MonotonicClock
from gspo_services.shared.runtime.errors import ConfigurationError, EndpointError
from gspo_services.shared.runtime.lifecycle import run_until_stopped

PORT: Final = 7420


def view_command(directories: Sequence[Path], *, host: str, port: int | None, cache: Path | None) -> int:
    """Serve until Ctrl-C. Raises: ConfigurationError if a path is not a directory or the address cannot be used."""
    for directory in directories:
        if not directory.is_dir():
            raise ConfigurationError(f"{directory} is not a directory: give the run.directory of a run")
    token = "" if is_loopback(host) else secrets.token_urlsafe(24)
    runs = watched_runs(directories, MonotonicClock())
    learner = LearnerNumbers(cache or Path.home() / ".cache" / "gspo" / "view")
    server = ViewServer(runs, PageAnswers(runs, learner), token)

    def ready(address: str) -> None:
        where = f"{address}?token={token}" if token else address
        print(f"gspo view: {len(runs)} run{'s' * (len(runs) > 1)} at {where}", flush=True)
        print("Ctrl-C ends it; the runs continue.", flush=True)

    async def serve(stop: asyncio.Event) -> None:
        if port is not None:
            await serve_until(stop, server, host, port, ready)
            return
        try:
            await serve_until(stop, server, host, PORT, ready)
        except EndpointError:
            await serve_until(stop, server, host, 0, ready)

    try:
        run_until_stopped(serve)
    except EndpointError as error:
        raise ConfigurationError(str(error)) from error
    finally:
        learner.close()
        for run in runs.values():
            run.close()
    return 0


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches the address. Of all names, only localhost counts as loopback."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
