"""A copy of the run's ledger that follows the log."""

from pathlib import Path

from gspo_services.broker.standby.database import DatabaseLog, LoggedRun
from gspo_services.broker.store import (
    LEDGER_FILE,
    LedgerDiverged,
    Store,
    StoreDamaged,
    decode_rows,
    loss_of,
    read_evidence,
    recorded,
)


class LedgerCopy:
    """The ledger in one broker's directory, brought up to the log. Not thread-safe."""

    def __init__(self, directory: Path, run: LoggedRun, log: DatabaseLog) -> None:
        """Open the ledger, or begin one, and compare it with the log.

        Raises: LedgerDiverged when it is not a part of the log; StoreMismatch, StoreUnavailable, StoreCorrupt.
        """
        path = directory / LEDGER_FILE
        # Before it is opened: that changes the mark.
        self._evidence = read_evidence(directory, path)
        self._log = log
        self.store = Store(path, fingerprint=run.fingerprint, run_id=run.run_id, log=log)
        try:
            self._require_part(run)
        except BaseException:
            self.store.close()
            raise

    def _require_part(self, run: LoggedRun) -> None:
        store, newest = self.store, self.store.newest
        away = (
            f"move {store.path.name} and what is beside it away, and it is built again from the log; or choose another "
            "broker.database_schema, or remove broker.database, to go on without that log"
        )
        if store.run_id != run.run_id:
            raise LedgerDiverged(f"{store.path}: is of run {store.run_id}, the log of run {run.run_id}: {away}")
        if not newest.number:
            return
        logged, last = self._log.commit(newest.number), self._log.newest()
        if last is None or last.number < newest.number:
            end = "is empty" if last is None else f"ends at commit {last.number}"
            raise LedgerDiverged(
                f"{store.path}: is at commit {newest.number}, and the log {end}: the log was restored, or lost its end in a "
                f"failover. Restore the log with these commits, or give them up: {away}"
            )
        if logged != newest:
            found = "none of that number" if logged is None else f"one with digest {logged.digest}"
            raise LedgerDiverged(
                f"{store.path}: commit {newest.number} has digest {newest.digest}, and the log has {found}: one of them was "
                f"restored, and went its own way. {away[0].upper()}{away[1:]}"
            )

    def follow(self, end: int) -> int:
        """Write the next commits of the log, up to ``end``, and not for long. Returns how many there were; 0: none is left.

        Raises: LedgerDiverged, StoreUnavailable.
        """
        commits = self._log.after(self.store.newest.number, end)
        for commit, content in commits:
            try:
                written = decode_rows(content)
            except ValueError as error:
                raise LedgerDiverged(f"commit {commit.number} of the log cannot be read: {error}") from error
            self.store.follow(commit, written)
        return len(commits)

    def require_whole(self) -> None:
        """Check that nothing is missing of which the files beside the ledger know, once everything was followed.

        Raises: StoreDamaged.
        """
        loss = loss_of(self._evidence, recorded(self.store, self._evidence))
        # A ledger that was built from the log has no mark yet.
        if loss and (self._evidence.mark is not None or loss.lines or loss.batches):
            raise StoreDamaged(
                f"{self.store.path}: {loss}. The database has lost acknowledged commits, or was restored: fail over to a "
                f"server that has them. To go on without them, move everything in {self.store.path.parent} away"
            )

    def close(self) -> None:
        self.store.close()
