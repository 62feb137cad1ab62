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
    """Return the name of a broker's process, of its log, and of its directory beside the first one's."""
    return f"broker-{number}" if number else "broker"


def ledger_directory(directory: Path, number: int) -> Path:
    """Return the directory of the ledger of broker ``number`` of the run in ``directory``."""
    return directory / broker_name(number) if number else directory


def ledger_directories(directory: Path) -> tuple[Path, ...]:
    """Return the ledger directory of each broker of the run, in order; the ledgers may not exist.

    Raises: NoLedger when a broker's directory is missing, or ``directory`` belongs to one of several brokers.
    """
    num_brokers, number = _brokers_of(directory)
    if number:
        raise NoLedger(
            f"{directory} has the ledger of broker {number} of {num_brokers}, only a part of a run: name the directory "
            f"above it, {directory.absolute().parent}"
        )
    found = tuple(ledger_directory(directory, each) for each in range(num_brokers))
    for each in found[1:]:
        if not each.is_dir():
            raise NoLedger(
                f"{each} does not exist, but {num_brokers} brokers share this run: if that broker runs on another host, "
                "copy its directory here, or look at the run on a host with all directories"
            )
    return found


def other_ledgers(directory: Path) -> tuple[Path, ...]:
    """Return the directories of the brokers besides the first, from settings.json; they may not exist."""
    num_brokers, number = _brokers_of(directory)
    return () if number else tuple(ledger_directory(directory, each) for each in range(1, num_brokers))


def is_held(directory: Path) -> bool:
    """Return whether a broker of the run in ``directory`` is alive on this machine."""
    num_brokers, _ = _brokers_of(directory)
    ledgers = [ledger_directory(directory, each) / LEDGER_FILE for each in range(num_brokers)]
    return any(lock_holder(path) is not None for path in ledgers)


def _brokers_of(directory: Path) -> tuple[int, int]:
    """Return how many brokers share the run, and the number of the one that ``directory`` belongs to; (1, 0) if unknown.

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
