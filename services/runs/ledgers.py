"""Where a run's ledgers are. Each of several brokers has its own, and together they are one run.

RUN                  of broker 0, with metrics.jsonl, checkpoints and logs
RUN/broker-1 ...     of the others, with the parts of a run's directory that belong to a broker
"""

import json
from pathlib import Path

from gspo_protocol.limits import MAX_BROKERS
from gspo_services.broker.store import LEDGER_FILE, NoLedger, lock_holder
from gspo_services.shared.settings import SETTINGS_FILE


def broker_name(number: int) -> str:
    """The name of a broker's process, of its log, and of its directory beside the first one's."""
    return f"broker-{number}" if number else "broker"


def ledger_directory(directory: Path, number: int) -> Path:
    """Where broker ``number`` of the run in ``directory`` has its ledger."""
    return directory / broker_name(number) if number else directory


def ledger_directories(directory: Path) -> tuple[Path, ...]:
    """Where each broker of the run has its ledger, in their order; whether there is one is not looked at.

    Raises: NoLedger when a broker's directory is missing, or ``directory`` is that of one of several brokers.
    """
    num_brokers, number = _brokers_of(directory)
    if number:
        raise NoLedger(
            f"{directory} has the ledger of broker {number} of {num_brokers}, which is a part of a run: name the directory "
            f"above it, {directory.absolute().parent}"
        )
    found = tuple(ledger_directory(directory, each) for each in range(num_brokers))
    for each in found[1:]:
        if not each.is_dir():
            raise NoLedger(
                f"{each} is not there, and {num_brokers} brokers share this run: if that broker runs on another host, "
                "copy its directory here, or look at the run where all are"
            )
    return found


def other_ledgers(directory: Path) -> tuple[Path, ...]:
    """The directories of the brokers besides the first, as settings.json says; whether they are there is not looked at."""
    num_brokers, number = _brokers_of(directory)
    return () if number else tuple(ledger_directory(directory, each) for each in range(1, num_brokers))


def is_held(directory: Path) -> bool:
    """Whether a broker of the run in ``directory`` is alive on this machine."""
    num_brokers, _ = _brokers_of(directory)
    ledgers = [ledger_directory(directory, each) / LEDGER_FILE for each in range(num_brokers)]
    return any(lock_holder(path) is not None for path in ledgers)


def _brokers_of(directory: Path) -> tuple[int, int]:
    """How many brokers share the run, and which of them ``directory`` belongs to; (1, 0) where nothing says it.

    What else settings.json says does not matter here: it may be of another release.
    """
    try:
        broker = json.loads((directory / SETTINGS_FILE).read_text(encoding="utf-8"))["broker"]
        num_brokers, number = broker.get("num_brokers", 1), broker.get("number", 0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return 1, 0
    if not (isinstance(num_brokers, int) and isinstance(number, int) and 0 <= number < num_brokers <= MAX_BROKERS):
        return 1, 0
    return num_brokers, number
