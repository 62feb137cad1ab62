"""Decides when an evaluation on the held-out tasks is due, and what its result is."""

from collections.abc import Sequence

from msgspec.structs import replace

from protocol.limits import MAX_EVALUATIONS
from protocol.messages import VersionScore
from services.broker.rows import EvaluationRow, LedgerContents, TrajectoryRow, VersionRow


class Evaluations:
    """Evaluations of weights trained on 0, every_batches, 2 * every_batches, ... batches, and of the last weights.

    At most one is open. A due one is skipped while another is open, except the last, which the run waits for.
    """

    def __init__(self, contents: LedgerContents, *, every_batches: int, num_batches: int, num_tasks: int) -> None:
        self._rows: dict[int, EvaluationRow] = {row.evaluation_id: row for row in contents.evaluations}
        self._every_batches = every_batches
        self._num_batches = num_batches
        self._num_tasks = num_tasks

    @property
    def enabled(self) -> bool:
        return self._every_batches > 0 and self._num_tasks > 0

    @property
    def open(self) -> EvaluationRow | None:
        return next((row for row in self._rows.values() if row.status == "open"), None)

    @property
    def last_done(self) -> EvaluationRow | None:
        done = [row for row in self._rows.values() if row.status == "done"]
        return max(done, key=lambda row: row.evaluation_id, default=None)

    def scores(self) -> list[VersionScore]:
        """Every evaluation, for the learner; of very many the best ones, and the one under way."""

        def worth(row: EvaluationRow) -> tuple[bool, bool, float]:
            return row.status == "open", row.reward is not None, row.reward or 0.0

        return [score_of(row) for row in sorted(self._rows.values(), key=worth)[-MAX_EVALUATIONS:]]

    @property
    def final_is_missing(self) -> bool:
        """Whether the run still waits for its final evaluation."""
        if not self.enabled:
            return False
        return not any(row.batch >= self._num_batches and row.status == "done" for row in self._rows.values())

    def is_due(self, newest: VersionRow | None) -> bool:
        """Whether the newest weights should be evaluated now."""
        if newest is None or not self.enabled or self.open is not None:
            return False
        batch = newest.trained_batches
        if any(row.batch == batch for row in self._rows.values()):
            return False
        return batch % self._every_batches == 0 or batch >= self._num_batches

    def start(self, newest: VersionRow) -> EvaluationRow:
        row = EvaluationRow(
            evaluation_id=max(self._rows, default=-1) + 1,
            policy_version=newest.policy_version,
            batch=newest.trained_batches,
            num_tasks=self._num_tasks,
        )
        self._rows[row.evaluation_id] = row
        return row

    def close(self, evaluation_id: int, trajectories: Sequence[TrajectoryRow]) -> EvaluationRow:
        """Close an evaluation whose trajectories all finished or failed. A failed one is counted, never as a reward of 0."""
        rewards = [row.reward for row in trajectories if row.status == "finished"]
        row = replace(
            self._rows[evaluation_id],
            status="done",
            reward=sum(rewards) / len(rewards) if rewards else None,
            num_finished=len(rewards),
            num_failed=len(trajectories) - len(rewards),
        )
        self._rows[evaluation_id] = row
        return row


def score_of(row: EvaluationRow) -> VersionScore:
    """What the learner hears of an evaluation."""
    return VersionScore(row.policy_version, row.status == "open", row.reward)
