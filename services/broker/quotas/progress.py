"""Notices leases that hold up the run: no token has come for far longer than usual, and everybody waits for it.

What is usual is measured: the time between a grant and its first tokens, and between tokens and the next ones or the result.
A trajectory that is taken back may need its time, as for one long tool call: it gets twice as much each time. Pure: time
comes in as a number.
"""

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from itertools import takewhile
from typing import Final

FACTOR: Final = 4.0
"""Late is what takes this many times as long as the slowest hundredth of the last MEASURED steps."""
MEASURED: Final = 512
ENOUGH: Final = 64
"""Fewer steps say nothing about what is usual."""
SLOWEST: Final = 0.99
MIN_PATIENCE_S: Final = 5.0
"""Nobody is late before that, however fast the others are."""
ROOM_S: Final = 2.5
"""A rollout that was told this recently that the window is full has room: it asks at least once a second."""


class Progress:
    """When each lease last brought something, and who has room."""

    def __init__(self, min_patience_s: float = MIN_PATIENCE_S) -> None:
        """``min_patience_s``: more where an episode may be silent for long, as in an agent's tools."""
        self._min_patience_s = min_patience_s
        # The one that moved last is the last.
        self._moved_at: OrderedDict[int, float] = OrderedDict()
        self._steps: deque[float] = deque(maxlen=MEASURED)
        self._taken_back: Counter[int] = Counter()
        self._with_room: dict[str, float] = {}

    def began(self, trajectory_id: int, now: float) -> None:
        """A lease was granted."""
        self._note(trajectory_id, now)

    def moved(self, trajectory_ids: Iterable[int], now: float) -> None:
        """New tokens of these came, or the result."""
        moved_at, to_end, step = self._moved_at, self._moved_at.move_to_end, self._steps.append
        for trajectory_id in trajectory_ids:
            if trajectory_id in moved_at:
                step(now - moved_at[trajectory_id])
            moved_at[trajectory_id] = now
            to_end(trajectory_id)

    def ended(self, trajectory_id: int, *, done: bool = False) -> None:
        """The lease has ended; ``done``: the trajectory needs no other one."""
        self._moved_at.pop(trajectory_id, None)
        if done:
            self._taken_back.pop(trajectory_id, None)

    def has_room(self, peer: str, now: float) -> None:
        """``peer`` could have had another lease, and there was none."""
        self._with_room[peer] = now

    def pause(self, seconds: float) -> None:
        """Nothing was heard for so long, through nobody's fault."""
        for trajectory_id in self._moved_at:
            self._moved_at[trajectory_id] += seconds

    def usual_s(self) -> float:
        """The time that hardly any step takes longer than; infinite while too few were seen."""
        if len(self._steps) < ENOUGH:
            return math.inf
        return sorted(self._steps)[int(SLOWEST * (len(self._steps) - 1))]

    def late(self, now: float) -> dict[int, float]:
        """The leases that are late, and for how many seconds nothing has come; none while no rollout has room."""
        self._with_room = {peer: at for peer, at in self._with_room.items() if now - at <= ROOM_S}
        if not self._with_room:
            return {}
        patience = max(self._min_patience_s, FACTOR * self.usual_s())
        silent = {each: now - at for each, at in takewhile(lambda item: now - item[1] >= patience, self._moved_at.items())}
        return {each: seconds for each, seconds in silent.items() if seconds >= patience * 2 ** self._taken_back[each]}

    def others_have_room(self, peer: str) -> bool:
        """Whether another rollout than ``peer`` could go on with its work."""
        return any(other != peer for other in self._with_room)

    def took_back(self, trajectory_id: int) -> None:
        """A late lease was ended; the next one of its trajectory has twice the time."""
        self._taken_back[trajectory_id] += 1
        self.ended(trajectory_id)

    def _note(self, trajectory_id: int, now: float) -> None:
        self._moved_at[trajectory_id] = now
        self._moved_at.move_to_end(trajectory_id)
