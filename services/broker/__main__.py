"""``gspo broker CONFIG``: one broker process."""

import sys
from functools import partial

import structlog

from gspo_services.broker.entry import run_broker
from gspo_services.shared.runtime.errors import exit_status
from gspo_services.shared.runtime.lifecycle import run_until_stopped
from gspo_services.shared.runtime.logs import configure_logging
from gspo_services.shared.settings import parse_process_arguments, told_settings

log = structlog.get_logger()


def main() -> int:
    """Serve one run until SIGTERM. Returns the exit status."""
    configure_logging("broker")
    return exit_status(_run)


def _run() -> None:
    settings = parse_process_arguments("gspo broker", "The durable queue of one run.", default_name="broker").settings
    log.info("settings", **told_settings(settings))
    run_until_stopped(partial(run_broker, settings))


if __name__ == "__main__":
    sys.exit(main())
