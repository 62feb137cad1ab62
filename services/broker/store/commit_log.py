"""The log that a ledger's commits go to before they are its own."""

from typing import Protocol

from gspo_services.broker.store.commits import Commit
from gspo_services.shared.runtime.errors import DiskDamageError


class LedgerDiverged(DiskDamageError):
    """A ledger and the log that it follows hold different rows. The text says where, and what to do."""


class CommitLog(Protocol):
    """Commits of one run, each of them once, in order, somewhere that outlives this machine's disk."""

    def append(self, commit: Commit, before: Commit, content: bytes) -> None:
        """Make ``commit``, which follows ``before``, durable with its rows. It may be acknowledged once this returns.

        A second call with the same commit changes nothing: the first may have succeeded without our knowledge.
        Raises: StoreUnavailable when that is not certain, trying again may help; ServiceError when it never will.
        """
