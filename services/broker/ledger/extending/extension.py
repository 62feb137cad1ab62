"""The usual chunks, counted without an object for each of their parts: they go on with the action under way. Pure.

The row of a trajectory need not be written with each of them: what they change follows from the chunks themselves, and
whoever reads the row adds those that it is behind.
"""

from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from protocol.limits import TrajectoryLimits
from protocol.messages import GroupSampling
from protocol.messages.gathered import Stretch
from services.broker.rows import TrajectoryRow, VersionRow

MOST_BEHIND: Final = 16
"""So many usual chunks are stored at most before the row of their trajectory is: a start reads no more of each lease."""
NO_LIMIT: Final = 2**62


class Extension:
    """A leased trajectory whose holder goes on with an action. It holds what more tokens of that action change: a row has 26
    fields, and a new one for each chunk would cost more than all that is decided about it.
    """

    __slots__ = (
        "_last_version", "_most_runs", "_most_tokens", "_num_behind", "_num_runs", "_row", "_turn", "_version_sum", "epoch",
        "holder", "lease_version", "min_version", "num_tokens",
    )  # fmt: skip

    def __init__(self, row: TrajectoryRow, *, most_tokens: int = NO_LIMIT, most_runs: int = NO_LIMIT) -> None:
        """``row``: as it is before the first of these chunks, also on the disk."""
        self._row = row
        self._num_behind = 0
        self._most_tokens = most_tokens
        self._most_runs = most_runs
        self.holder = (row.holder_peer, row.holder_session)
        self.epoch = row.epoch
        self.num_tokens = row.num_tokens
        self.min_version = row.min_version
        self.lease_version = row.lease_version
        self._version_sum = row.version_sum
        self._num_runs = row.num_runs
        self._last_version = row.last_version
        self._turn = row.num_turns - 1

    def take(self, stretch: Stretch, newest: VersionRow) -> bool:
        """Count all chunks of a stretch: what ``growth`` and ``grown_row`` make of one after the other. False: they are not
        usual ones that go on from here, or one of them must not be taken, and ``growth`` says which.
        """
        if not stretch.is_usual or stretch.offset != self.num_tokens or stretch.turn != self._turn:
            return False
        versions = stretch.versions
        oldest, last = versions[0][0], versions[-1][0]
        end = self.num_tokens + stretch.num_tokens
        num_runs = self._num_runs + len(versions) - (oldest == self._last_version)
        if (
            stretch.largest_token_id >= newest.vocabulary
            or oldest < self.lease_version
            or last > newest.policy_version
            or end > self._most_tokens
            or num_runs > self._most_runs
        ):
            return False
        self._count(end, oldest, last, num_runs, stretch.version_sum)
        return True

    def add(self, versions: Sequence[tuple[int, int]]) -> None:
        """Count tokens that are stored: ``versions`` made so many each, in this order."""
        oldest, last = versions[0][0], versions[-1][0]
        num_runs = self._num_runs + len(versions) - (oldest == self._last_version)
        end = self.num_tokens + sum(number for _, number in versions)
        self._count(end, oldest, last, num_runs, sum(version * number for version, number in versions))

    def _count(self, end: int, oldest: int, last: int, num_runs: int, version_sum: int) -> None:
        self.num_tokens = end
        self.min_version = min(self.min_version, oldest)
        self.lease_version = self._last_version = last
        self._version_sum += version_sum
        self._num_runs = num_runs

    def due_row(self) -> TrajectoryRow | None:
        """The row, if it is to be stored with the chunks that were just counted; None: it may be behind them."""
        self._num_behind += 1
        if self._num_behind < MOST_BEHIND:
            return None
        self._num_behind = 0
        return self.row

    @property
    def row(self) -> TrajectoryRow:
        """The row with all chunks so far."""
        row = self._row
        if self.num_tokens != row.num_tokens:
            self._row = row = replace(
                row,
                num_tokens=self.num_tokens,
                num_action_tokens=row.num_action_tokens + self.num_tokens - row.num_tokens,
                version_sum=self._version_sum,
                min_version=self.min_version,
                lease_version=self.lease_version,
                num_runs=self._num_runs,
                last_version=self._last_version,
            )
        return row


def extension_of(row: TrajectoryRow, *, limits: TrajectoryLimits, sampling: GroupSampling) -> Extension | None:
    """None: the trajectory is not leased, or whatever comes next is no more of an action under way."""
    goes_on = row.status == "leased" and not row.sequences and row.last_version >= 1
    if not goes_on or row.num_segments > limits.segments or row.num_turns > limits.turns:
        return None
    most_tokens = min(sampling.max_tokens, sampling.max_episode_tokens)
    return Extension(row, most_tokens=most_tokens, most_runs=limits.runs)
