"""``gspo sandbox [CONFIG]``: one server of sandboxes, or a try of what a configuration names."""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

import structlog
from prometheus_client import CollectorRegistry

from gspo_services.shared.runtime.clock import MonotonicClock
from gspo_services.shared.runtime.config_arguments import add_override_argument
from gspo_services.shared.runtime.errors import ConfigurationError, exit_status
from gspo_services.shared.runtime.lifecycle import run_until_stopped, until_stopped
from gspo_services.shared.runtime.logs import configure_logging
from gspo_services.shared.runtime.telemetry import Health, TelemetryServer
from gspo_services.shared.settings import Settings, is_private, load_settings
from gspo_services.tasks.sandbox import (
    LocalSandboxes,
    ProgramRefused,
    SandboxUnavailable,
    local_options,
    max_sandboxes_of,
    unusable,
)
from gspo_services.tasks.sandbox.server.conversation import SandboxBounds
from gspo_services.tasks.sandbox.server.metrics import SandboxMetrics
from gspo_services.tasks.sandbox.server.server import SandboxServer
from gspo_services.tasks.sandbox.server.trial import try_sandbox
from gspo_services.tasks.sandbox.wire import KEY_VARIABLE

log = structlog.get_logger()

BEAT_S: Final = 1.0
MAX_QUIET_S: Final = 30.0
DESCRIPTION: Final = """\
Serve sandboxes: rollouts on other machines run programs of the policy here, in bubblewrap, as many at a time as
sandbox.max_sandboxes says. They name this server in sandbox.urls. Without CONFIG every setting has its default.

  GSPO_SANDBOX_KEY=... gspo sandbox run.toml --set sandbox.host=0.0.0.0
  gspo sandbox run.toml --try              run some programs where run.toml says, here or on servers, and time them
  gspo sandbox run.toml --try g++ java     also ask whether these programs are there

On SIGTERM no new sandbox is given; those in use have sandbox.drain_s to end. Status 2: programs cannot be separated here; 6:
perhaps only this time.
"""


def sandbox_command(argv: Sequence[str] | None = None) -> int:
    """Parse the command line; serve until SIGTERM, or try. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="gspo sandbox", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path, nargs="?", help="a TOML file with a section [sandbox]")
    add_override_argument(parser, "override one setting, such as --set sandbox.max_sandboxes=8; can be repeated")
    parser.add_argument(
        "--try", dest="programs", nargs="*", metavar="PROGRAM", help="run programs instead of serving; also look for PROGRAM"
    )
    arguments = parser.parse_args(argv)
    configure_logging("sandbox")
    return exit_status(lambda: _act(arguments))


def _act(arguments: argparse.Namespace) -> int:
    settings = load_settings(arguments.config, arguments.overrides)
    if arguments.programs is not None:
        return asyncio.run(try_sandbox(settings.sandbox, arguments.programs, sys.stdout.write))
    run_until_stopped(partial(serve, settings, os.environ.get(KEY_VARIABLE, "")))
    return 0


async def serve(settings: Settings, key: str, stop: asyncio.Event) -> None:
    """Serve sandboxes until ``stop`` is set, and let those in use end. Raises: ConfigurationError; EndpointError."""
    section = settings.sandbox
    _require_key(section.host, key, settings.security.allow_plaintext)
    registry, clock = CollectorRegistry(), MonotonicClock()
    health = Health(clock, MAX_QUIET_S)
    max_sandboxes = max_sandboxes_of(section)
    try:
        async with LocalSandboxes(local_options(section)).opened() as sandboxes:
            bounds = SandboxBounds(
                max_wall_s=section.max_wall_s, max_memory_bytes=section.max_memory_bytes, idle_s=section.idle_s
            )
            server = SandboxServer(
                sandboxes,
                SandboxMetrics(registry),
                bounds,
                max_sandboxes=max_sandboxes,
                max_waiting=section.max_waiting,
                key=key,
                memory=sandboxes.memory,
            )
            metrics_host = settings.security.metrics_host
            with TelemetryServer(metrics_host, section.metrics_port, registry, health) as telemetry:
                host, port = await server.start(section.host, section.port)
                log.info(
                    "sandbox_started",
                    host=host,
                    port=port,
                    max_sandboxes=max_sandboxes,
                    memory=sandboxes.memory,
                    metrics_port=telemetry.port,
                    key=bool(key),
                )
                try:
                    while not await until_stopped(stop, BEAT_S):
                        health.progress()
                finally:
                    health.not_ready("stopping")
                    await server.stop(section.drain_s)
    except (SandboxUnavailable, ProgramRefused) as error:
        raise unusable(error) from error
    log.info("sandbox_stopped")


def _require_key(host: str, key: str, allow_plaintext: bool) -> None:
    """Raises: ConfigurationError for a server that strangers could reach."""
    if not (key or allow_plaintext or is_private(f"http://[{host}]:1" if ":" in host else f"http://{host}:1")):
        raise ConfigurationError(
            f"sandbox.host is {host!r}: other hosts can reach that, and whoever does could run programs here; set the "
            f"variable {KEY_VARIABLE} here and where rollouts run, or security.allow_plaintext = true where nobody else "
            "reaches it"
        )
    if key and (len(key) < 16 or not key.isascii() or not key.isprintable() or " " in key):
        raise ConfigurationError(
            f"{KEY_VARIABLE} must be 16 or more printable ASCII characters without spaces, such as `openssl rand -hex 32` "
            "makes"
        )


if __name__ == "__main__":
    sys.exit(sandbox_command())
