"""`python -m services.broker CONFIG.toml [--set section.key=value]`: one broker process."""

import argparse
import sys
from pathlib import Path

import structlog

from services.broker.entry import run_broker
from services.runtime.lifecycle import EXIT_CONFIGURATION, run_process
from services.runtime.logs import configure_logging
from services.runtime.settings.configuration import ConfigurationError, load_settings


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m services.broker", description="The durable queue of one run.")
    parser.add_argument("config", type=Path, help="the run's TOML file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting")
    arguments = parser.parse_args()
    configure_logging("broker")
    log = structlog.get_logger()
    try:
        settings = load_settings(arguments.config, arguments.set)
    except ConfigurationError as error:
        log.error("cannot_start", error=str(error))
        return EXIT_CONFIGURATION
    log.info("settings", **settings.model_dump(mode="json"))
    return run_process(lambda stop: run_broker(settings, stop))


if __name__ == "__main__":
    sys.exit(main())
