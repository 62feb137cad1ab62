"""The arguments that name a configuration. Apart from the settings, which take long to import: --help needs none."""

import argparse
from pathlib import Path


def add_configuration_arguments(parser: argparse.ArgumentParser) -> None:
    """Add CONFIG and --set to a command line."""
    parser.add_argument(
        "config", type=Path, help="the run's TOML file, at whose folder its relative paths start; examples are in examples/"
    )
    add_override_argument(parser, "override one setting, such as --set batch.max_lag=0; can be repeated")


def add_override_argument(parser: argparse.ArgumentParser, text: str) -> None:
    """Add --set, with the help ``text``, to a command line; its values are ``overrides``."""
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE", help=text)
