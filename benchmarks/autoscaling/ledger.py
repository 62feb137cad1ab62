"""The broker's decisions on leases and batches, made by its own ``Admission``.

Grants come in the order of services/broker/ledger/leases/leases.py: unfinished trajectories by the oldest version of their
group, then those of groups without tokens, then new groups. The window is kept between requests instead of being counted for
each: grants change it, and it is counted again when a version, a batch or a lost lease changes oldest versions otherwise.
"""

import heapq
from collections.abc import Callable, Iterable

from benchmarks.autoscaling.config import Config
from benchmarks.autoscaling.engine import Group, Trajectory
from gspo_services.broker.ledger.admission import Admission, Outstanding, Window


class Ledger:
    """Groups that are neither batched nor dropped. Versions start at 1."""

    def __init__(self, config: Config, length: Callable[[int], float]) -> None:
        self._config = config
        self._admission = Admission(max_lag=config.max_lag, groups_per_batch=config.groups_per_batch)
        self._length = length
        self._groups: dict[int, Group] = {}
        self._free: dict[int, list[int]] = {}
        self._next_trajectory = 0
        self._next_group = 0
        self.num_complete = 0
        self.num_free = 0
        self.num_started = 0
        self.newest = 1
        self.next_version = 1
        """The version at which the next batch will be assembled."""
        self.due: set[int] = set()
        """Groups that the last choice may not skip: until one of them is complete there is no other choice."""
        self._window = self._count()

    @property
    def num_outstanding(self) -> int:
        return len(self._groups)

    def trajectories(self) -> Iterable[Trajectory]:
        """Over all groups in play."""
        return (trajectory for group in self._groups.values() for trajectory in group.trajectories)

    def counts_right(self) -> bool:
        """Tell whether the kept window agrees with a new count."""
        return vars(self._window) == vars(self._count())

    def _oldest_possible_version(self, group: Group) -> int:
        return group.oldest_version or self.newest

    def _count(self) -> Window:
        oldest_versions = (self._oldest_possible_version(group) for group in self._groups.values())
        return Window(self._admission, oldest_versions, version=self.next_version)

    # --- rollouts ------------------------------------------------------------------------------------------------

    def grant(self, capacity: int, version: int) -> list[Trajectory]:
        """At most ``capacity`` trajectories for an engine that serves ``version``."""
        granted: list[Trajectory] = []
        if version < self._admission.oldest_allowed(self.next_version):
            return granted
        # Groups without an oldest version come last.
        for oldest_version in sorted(self._free, key=lambda oldest_version: (not oldest_version, oldest_version)):
            if len(granted) < capacity:
                self._grant_of(oldest_version, capacity, version, granted)
        while len(granted) < capacity and self._window.add(version):
            group = self._start(version)
            while group.free and len(granted) < capacity:
                granted.append(self._lease(group, version))
            self._offer(group)
        return granted

    def _grant_of(self, oldest_version: int, capacity: int, version: int, granted: list[Trajectory]) -> None:
        queue = self._free[oldest_version]
        while queue and len(granted) < capacity:
            group = self._groups.get(queue[0])
            if group is None or group.oldest_version != oldest_version or not group.free:
                heapq.heappop(queue)
                continue
            if not self._window.extend(self._oldest_possible_version(group), version):
                return
            while group.free and len(granted) < capacity:
                granted.append(self._lease(group, version))
            heapq.heappop(queue)
            self._offer(group)
        if not queue:
            del self._free[oldest_version]

    def _offer(self, group: Group) -> None:
        if group.free:
            heapq.heappush(self._free.setdefault(group.oldest_version, []), group.group_id)

    def _start(self, version: int) -> Group:
        group = Group(self._next_group, version)
        self._next_group += 1
        for _ in range(self._config.group_size):
            trajectory = Trajectory(self._next_trajectory, group, self._length(self._next_trajectory))
            self._next_trajectory += 1
            group.trajectories.append(trajectory)
        group.free = group.trajectories[::-1]
        self.num_free += len(group.free)
        self._groups[group.group_id] = group
        return group

    def _lease(self, group: Group, version: int) -> Trajectory:
        trajectory = group.free.pop()
        self.num_free -= 1
        self.num_started += int(trajectory.done == 0)
        trajectory.min_version = min(trajectory.min_version or version, version)
        group.oldest_version = min(group.oldest_version or version, version)
        return trajectory

    def finish(self, trajectory: Trajectory) -> bool:
        """Tell whether a batch may have become possible."""
        group = trajectory.group
        trajectory.finished = True
        group.num_finished += 1
        if not group.complete:
            return False
        self.num_complete += 1
        return not self.due or group.group_id in self.due

    def release(self, trajectories: Iterable[Trajectory]) -> None:
        """End their leases; they continue from the acknowledged tokens."""
        for trajectory in trajectories:
            group = trajectory.group
            if trajectory.done == 0:
                trajectory.min_version = 0
            group.free.append(trajectory)
            self.num_free += 1
            group.oldest_version = min((t.min_version for t in group.trajectories if t.min_version), default=0)
            self._offer(group)
        self.due = set()
        self._window = self._count()

    # --- learner -------------------------------------------------------------------------------------------------

    def published(self) -> None:
        """Take the version of the newest batch as published."""
        self.newest += 1
        assert self.newest == self.next_version, (self.newest, self.next_version)
        self._window = self._count()

    def take_batch(self) -> list[Group]:
        """Return the next batch; empty: it has to wait (``due`` may name the groups it waits for)."""
        if self.num_complete < self._config.groups_per_batch:
            self.due = set()
            return []
        choice = self._admission.choose_batch(
            [
                Outstanding(
                    group_id=group.group_id, oldest_version=self._oldest_possible_version(group), complete=group.complete
                )
                for group in self._groups.values()
            ],
            version=self.newest,
        )
        self.due = set(choice.due)
        batch = [self._groups.pop(group_id) for group_id in choice.group_ids]
        if batch:
            self.num_complete -= len(batch)
            self.next_version += 1
            self._window = self._count()
        return batch
