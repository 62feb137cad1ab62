"""Trajectories on trial (``ledger.losses``): which wait for a rollout without work, and which such a rollout has."""

from collections.abc import Iterator

from gspo_services.broker.ledger.actions import SessionKey
from gspo_services.broker.ledger.group_states import Groups
from gspo_services.broker.ledger.losses import TRIAL_S, is_on_trial
from gspo_services.broker.rows import TrajectoryRow


class Trials:
    """Not durable: after a restart of the broker a trial begins anew."""

    def __init__(self, groups: Groups, now: float) -> None:
        self._groups = groups
        self._waiting: dict[int, float] = {}
        """Free trajectories on trial: until when they wait."""
        self._alone: dict[int, int] = {}
        """The epoch of each lease whose holder has nothing else."""
        for row in (*groups.free_held_out(), *groups.free_for_training()):
            self.note(row.trajectory_id, now)

    def note(self, trajectory_id: int, now: float) -> None:
        """A lease has ended. The wait goes on where it was begun before."""
        row = self._groups.trajectory(trajectory_id)
        self._alone.pop(trajectory_id, None)
        if row is not None and row.status == "free" and is_on_trial(row):
            self._waiting.setdefault(trajectory_id, now + TRIAL_S)

    def waiting(self, sender: SessionKey) -> Iterator[TrajectoryRow]:
        """Those that ``sender`` may have, because it has nothing else."""
        if self._waiting and not self._groups.held_by(sender.peer):
            for trajectory_id in list(self._waiting):
                row = self._groups.trajectory(trajectory_id)
                if row is None or not is_on_trial(row):
                    del self._waiting[trajectory_id]
                elif row.status == "free":
                    yield row

    def keeps_back(self, row: TrajectoryRow, now: float) -> bool:
        """Whether the trajectory still waits."""
        return is_on_trial(row) and now < self._waiting.get(row.trajectory_id, 0.0)

    def begin(self, trajectory_id: int) -> None:
        """A rollout that has nothing else was granted the trajectory."""
        for former in [each for each in self._alone if self._groups.trajectory(each) is None]:
            del self._alone[former]
        row = self._groups.trajectory(trajectory_id)
        assert row is not None
        self._alone[trajectory_id] = row.epoch

    def holds_one(self, sender: SessionKey) -> bool:
        """Whether ``sender`` has one that has brought no token yet: it gets nothing else."""
        if not self._alone:
            return False
        held = self._groups.held_by(sender.peer)
        return any(self.is_alone(row) and row.num_tokens == row.lease_start for row in held)

    def is_alone(self, row: TrajectoryRow) -> bool:
        """Whether the holder of this lease has nothing else."""
        return self._alone.get(row.trajectory_id) == row.epoch
