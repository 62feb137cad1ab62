"""Opens and audits a run, of one broker or of several."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gspo_services.broker.store import reading
from gspo_services.runs.audit import Audit, audit_ledger, read_checkpoints
from gspo_services.runs.ledgers import ledger_directories
from gspo_services.runs.reading import OpenRun


@contextmanager
def open_run(directory: Path) -> Iterator[OpenRun]:
    """Read ``directory`` as it stands now: one state of the ledger, whatever a running broker writes meanwhile.

    Keep it open for as long as one look takes: a broker cannot shorten its write-ahead log meanwhile. For a live run, open
    it again. Not thread-safe. Raises: NoLedger when there is no ledger of this release, or one of several is missing;
    later, each method raises StoreCorrupt where what it reads is damaged (both of ``gspo_services.broker.store``, both
    with the way out).
    """
    ledgers = ledger_directories(directory)
    if len(ledgers) == 1:
        with reading(directory) as connection:
            yield OpenRun(directory, connection)
        return
    from gspo_services.runs.several import open_shared_run

    with open_shared_run(directory, ledgers) as run:
        yield run


def audit_run(directory: Path) -> Audit:
    """Check everything that ``directory`` holds. Memory grows with the number of batches, not of trajectories.

    Raises: NoLedger when it is not a run directory, or the directory of one of several brokers is missing.
    """
    ledgers = ledger_directories(directory)
    if len(ledgers) == 1:
        # Before the snapshot: what a live run writes next would be newer than a snapshot taken before it.
        checkpoints = read_checkpoints(directory)
        return audit_ledger(directory, checkpoints)
    from gspo_services.runs.several import audit_several

    return audit_several(directory, ledgers)
