"""``gspo accept-loss RUN_DIR``: continue a damaged run with what is left of it."""

import sqlite3
import sys
from pathlib import Path

from gspo_services.broker.store import LEDGER_FILE, StoreUnavailable, accept_loss
from gspo_services.shared.runtime.errors import EXIT_DAMAGED, EXIT_FAILED, ConfigurationError, DiskDamageError, OccupiedError
from gspo_services.shared.runtime.operations import operation_on
from gspo_services.shared.runtime.plain_text import one_line
from gspo_services.shared.settings import several_brokers_in


def accept_loss_command(directory: Path) -> int:
    """Record what is lost. Returns 0 when a broker can go on, 1 when something is in the way, 3 when there is no way on.

    Raises: ConfigurationError for a run of several brokers.
    """
    if reason := several_brokers_in(directory):
        raise ConfigurationError(reason)
    try:
        with operation_on(directory, "accept-loss", alone=True):
            accepted = accept_loss(directory / LEDGER_FILE)
    except (StoreUnavailable, OccupiedError, OSError, sqlite3.OperationalError) as error:
        print(one_line(f"gspo accept-loss: {error}"), file=sys.stderr)
        return EXIT_FAILED
    except DiskDamageError as error:
        print(one_line(f"gspo accept-loss: {error}"), file=sys.stderr)
        return EXIT_DAMAGED
    if accepted is None:
        print("nothing is missing: there is no loss to accept")
        return 0
    loss, aside = accepted
    print(one_line(f"accepted and recorded: {loss}"))
    print(one_line(f"what was there is kept in {aside}. Start the run again: it continues from what is left"))
    return 0
