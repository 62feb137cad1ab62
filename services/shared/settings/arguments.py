"""The command line that every process shares: a configuration file and overrides."""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gspo_services.shared.runtime.config_arguments import add_configuration_arguments
from gspo_services.shared.runtime.private_files import keep_private
from gspo_services.shared.settings.configuration import load_settings
from gspo_services.shared.settings.sections import Settings


@dataclass(frozen=True, kw_only=True)
class ProcessArguments:
    """The arguments of a process. ``forwarded`` starts another process with the same configuration."""

    settings: Settings
    name: str
    forwarded: tuple[str, ...]


def parse_process_arguments(
    prog: str,
    description: str,
    default_name: str,
    argv: Sequence[str] | None = None,
    *,
    shorthands: Mapping[str, tuple[str, str]] = {},
    environment: Mapping[str, str] = os.environ,
) -> ProcessArguments:
    """Parse the command line of one process, whose files are private from now on.

    Raises: ConfigurationError; SystemExit for --help and unknown arguments.
    ``shorthands``: options that stand for one override each, with their help. ``environment``: may also hold settings.
    """
    parser = argparse.ArgumentParser(prog=prog, description=description)
    add_configuration_arguments(parser)
    for option, (override, text) in shorthands.items():
        parser.add_argument(
            option, dest="overrides", action="append_const", const=override, help=f"{text}; the same as --set {override}"
        )
    parser.add_argument("--name", default=default_name, help="this process's name among its peers (default: %(default)s)")
    arguments = parser.parse_args(argv)
    settings = load_settings(arguments.config, arguments.overrides, environment, fetch=True)
    keep_private(settings.run.directory)
    return ProcessArguments(
        settings=settings,
        name=arguments.name,
        forwarded=(*forwarded_arguments(arguments.config, arguments.overrides), "--name", arguments.name),
    )


def forwarded_arguments(config: Path, overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the words that start another process with the same configuration."""
    return (str(config), *(word for override in overrides for word in ("--set", override)))
