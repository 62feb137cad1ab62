"""The deadline of each lease, in order, so that finding expired ones touches no others. Pure."""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import takewhile


class Deadlines:
    """A time for each trajectory. All are set the same time ahead, so the one that was set last is the last to come."""

    def __init__(self) -> None:
        self._at: OrderedDict[int, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._at)

    def set(self, trajectory_id: int, at: float) -> None:
        """Set one deadline. ``at`` must not be earlier than any set before."""
        self.set_all((trajectory_id,), at)

    def set_all(self, trajectory_ids: Iterable[int], at: float) -> None:
        """Set the same deadline for several trajectories, after tokens of each."""
        known, to_end = self._at, self._at.move_to_end
        for trajectory_id in trajectory_ids:
            known[trajectory_id] = at
            to_end(trajectory_id)

    def remove(self, trajectory_id: int) -> None:
        """Remove a trajectory's deadline, if it has one."""
        self._at.pop(trajectory_id, None)

    def past(self, now: float) -> list[int]:
        """The trajectories whose time has come, by time."""
        return [trajectory_id for trajectory_id, _ in takewhile(lambda item: item[1] <= now, self._at.items())]

    def postpone(self, seconds: float) -> None:
        """Postpone all deadlines by this much."""
        for trajectory_id in self._at:
            self._at[trajectory_id] += seconds
