"""Numbers policy versions: the same weights keep their number after a restart, and other weights never get it.

    root/last-version       the learner that writes here, and the last numbers that were given, as JSON

A number is noted before anyone can ask for its batch, and the weights' digest before anyone can fetch them. So a
number without a digest was never served: if its learner dies, any weights of as many batches may have it. One with a digest
goes to the same weights only. The note also names the learner that began last: an older one, cut off from the broker, trains
alongside it for a while and must give no more numbers. And it has the newest commit of the broker's ledger: a ledger with
another past does not go with these checkpoints.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Final

import msgspec
import structlog

from gspo.files import replace_file
from gspo_protocol.messages import Count, LedgerCommit, Name, Version, Welcome
from gspo_services.learner.checkpoints.format import CheckpointError, unwritten_error

log = structlog.get_logger()

LAST_VERSION: Final = "last-version"
KEPT: Final = 8
"""Numbers in the note: more than can be given before the broker commits the first of them."""


class Given(msgspec.Struct, frozen=True, kw_only=True):
    """One number and the weights that have it; ``digest`` is empty until they can be fetched."""

    policy_version: Version
    trained_batches: Count
    digest: str = ""


class _Note(msgspec.Struct, frozen=True):
    learner: Name
    newest: Version
    given: list[Given]
    commits: list[LedgerCommit | None] = []
    """One, once there is any: the newest commit of the broker's ledger that a learner was told of. A list, as in gspo 0.1.0,
    whose notes are read."""

    @property
    def commit(self) -> LedgerCommit | None:
        return self.commits[0] if self.commits else None


class Versions:
    """Numbers each set of weights. One learner at a time owns the note; ``begin`` takes it over."""

    def __init__(self, root: Path, learner: str, commit: Callable[[], LedgerCommit | None] = lambda: None) -> None:
        """``learner`` names one life of a learner. ``commit``: see ``BrokerPort``."""
        self._root = root
        self._learner = learner
        self._commit = commit
        self._last = 0
        """The last number that this learner gave."""
        self._newest = 0
        """The highest number given by any learner."""
        self._given: list[Given] = []
        self._noted: LedgerCommit | None = None
        self._one_at_a_time = Lock()
        """The main thread gives numbers, that of announcements notes digests, that of checkpoints commits: into one file."""

    def begin(self, welcome: Welcome) -> None:
        """Take the note over from any former learner. ``welcome`` names the newest version that the broker has committed.

        Raises: CheckpointError when the note is damaged or cannot be written.
        """
        note = read_note(self._root)
        self._given = [] if note is None else [each for each in note.given if each.policy_version > welcome.policy_version]
        if welcome.weights_digest:
            committed = Given(
                policy_version=welcome.policy_version,
                trained_batches=welcome.trained_batches,
                digest=welcome.weights_digest,
            )
            self._given.insert(0, committed)
        self._noted = None if note is None else note.commit
        self._newest = max(0 if note is None else note.newest, welcome.policy_version)
        self._write()

    def needs_digest(self, trained_batches: int) -> bool:
        """Return whether weights of so many batches may have a number already, which only their digest shows."""
        return any(known.digest for known in self._former(trained_batches))

    def _former(self, trained_batches: int) -> list[Given]:
        return [each for each in self._given if each.policy_version > self._last and each.trained_batches == trained_batches]

    def number(self, digest: str, trained_batches: int) -> int:
        """Return the number of the weights with this digest: the same as under an earlier learner, or the next new one.

        ``digest``: may be empty unless ``needs_digest``.
        """
        for known in self._former(trained_batches):
            if not known.digest or known.digest == digest:
                return known.policy_version
            log.info("other_weights_than_before", trained_batches=trained_batches, policy_version=known.policy_version)
        return self._newest + 1

    def reserve(self, policy_version: int, trained_batches: int) -> None:
        """Note durably that this number is given. Raises: CheckpointError when another learner has the note, or it cannot
        be written."""
        with self._one_at_a_time:
            self.require_mine()
            self._last = policy_version
            if policy_version > self._newest:
                self._newest = policy_version
                self._given.append(Given(policy_version=policy_version, trained_batches=trained_batches))
                self._write()

    def note_digest(self, policy_version: int, digest: str) -> None:
        """Note durably which weights have a reserved number: from now on they may be served. Raises: CheckpointError."""
        with self._one_at_a_time:
            (place,) = [place for place, each in enumerate(self._given) if each.policy_version == policy_version]
            if self._given[place].digest == digest:
                return
            self.require_mine()
            self._given[place] = msgspec.structs.replace(self._given[place], digest=digest)
            self._write()

    def note_commit(self) -> None:
        """Note durably how far the ledger is, before there is a checkpoint of what it holds. Raises: CheckpointError."""
        with self._one_at_a_time:
            self.require_mine()
            self._write()

    def require_mine(self) -> None:
        """Raises: CheckpointError when another learner has begun since this one."""
        note = read_note(self._root)
        if note is not None and note.learner != self._learner:
            raise CheckpointError(
                f"{self._root / LAST_VERSION}: another learner uses this run.directory, and began after this one (its "
                f"newest version is {note.newest}); stop one of the two"
            )

    def _write(self) -> None:
        self._given = self._given[-KEPT:]
        commit = self._commit()
        note = _Note(
            learner=self._learner,
            newest=self._newest,
            given=self._given,
            commits=[self._noted if commit is None else commit],
        )
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            replace_file(self._root / LAST_VERSION, msgspec.json.encode(note).decode() + "\n")
        except OSError as error:
            raise unwritten_error(self._root / LAST_VERSION, error) from error


def read_note(root: Path) -> _Note | None:
    """Read the note; None: it does not exist yet. Raises: CheckpointError when it is damaged."""
    path = root / LAST_VERSION
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    try:
        # A manual repair writes only the number.
        found = msgspec.json.decode(content, type=_Note | Version)
    except (ValueError, RecursionError) as error:
        text = content[:100].decode(errors="replace")
        raise CheckpointError(
            f"{path} holds {text!r}, not a version ({error}); write the newest version that engines served, as a number"
        ) from error
    return _Note(learner="a person", newest=found, given=[]) if isinstance(found, int) else found


def known_commit(root: Path) -> LedgerCommit | None:
    """Return the newest commit of the broker's ledger that a learner in ``root`` was told of; None: of none.

    Raises: CheckpointError when the note is damaged."""
    note = read_note(root)
    return None if note is None else note.commit


def given(root: Path) -> Sequence[Given]:
    """Return the last numbers given, oldest first. Raises: CheckpointError when the note is damaged."""
    note = read_note(root)
    return () if note is None else tuple(note.given)
