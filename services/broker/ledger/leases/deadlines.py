"""When each lease ends, in order: finding those that have ended looks at no other. Pure."""

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
        """``at``: no earlier than any that was set before."""
        self.set_all((trajectory_id,), at)

    def set_all(self, trajectory_ids: Iterable[int], at: float) -> None:
        """The same for several: one for each trajectory of which tokens came."""
        known, to_end = self._at, self._at.move_to_end
        for trajectory_id in trajectory_ids:
            known[trajectory_id] = at
            to_end(trajectory_id)

    def remove(self, trajectory_id: int) -> None:
        """It need not be there."""
        self._at.pop(trajectory_id, None)

    def past(self, now: float) -> list[int]:
        """The trajectories whose time has come, by time."""
        return [trajectory_id for trajectory_id, _ in takewhile(lambda item: item[1] <= now, self._at.items())]

    def postpone(self, seconds: float) -> None:
        """All of them, by so much."""
        for trajectory_id in self._at:
            self._at[trajectory_id] += seconds
