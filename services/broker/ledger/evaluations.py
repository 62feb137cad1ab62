"""Decides when an evaluation of a set is due, and what its result is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from gspo_protocol.limits import MAX_EVALUATIONS
from gspo_protocol.messages import GroupSampling, VersionScore
from gspo_services.broker.ledger.lengths import length_stats, standard_error
from gspo_services.broker.rows import EvaluationRow, LedgerContents, TrajectoryRow, VersionRow
from gspo_services.shared.eval_metrics import Estimate, TaskSamples, estimate


@dataclass(frozen=True, kw_only=True)
class SetTerms:
    """One set as the ledger needs it."""

    name: str = ""
    """Empty: the run's own held-out tasks."""
    every_batches: int
    num_tasks: int
    samples: int = 1
    metrics: tuple[str, ...] = ()
    """Without maj@k: the ledger has tokens but no answers."""
    solved_at: float = 1.0
    ratings: tuple[float | None, ...] = ()
    """Each task's difficulty on Elo's scale; empty if no metric needs it."""
    best_by: str = ""
    """The metric by which the best checkpoint is chosen; empty: this set does not decide it."""
    sampling: GroupSampling | None = None
    """None: as groups of training that begin then."""

    @property
    def is_used(self) -> bool:
        return self.every_batches > 0 and self.num_tasks > 0


class Evaluations:
    """For each set: evaluations of weights trained on 0, every_batches, 2 * every_batches, ... batches, and of the last.

    Of each set at most one is open. A due one is skipped while another of its set is open, except the last, which the run
    waits for.
    """

    def __init__(self, contents: LedgerContents, sets: Sequence[SetTerms], *, num_batches: int) -> None:
        self._rows: dict[int, EvaluationRow] = {row.evaluation_id: row for row in contents.evaluations}
        self._sets = {terms.name: terms for terms in sets if terms.is_used}
        self._all = {terms.name: terms for terms in sets}
        self._num_batches = num_batches
        self.latest: dict[str, list[Estimate]] = {}
        """The newest result of each named set since this broker started."""

    @property
    def open(self) -> list[EvaluationRow]:
        return [row for row in self._rows.values() if row.status == "open"]

    @property
    def last_done(self) -> EvaluationRow | None:
        """The newest of the set that decides which checkpoint is the best."""
        done = [row for row in self._rows.values() if row.status == "done" and self.decides(row)]
        return max(done, key=lambda row: row.evaluation_id, default=None)

    def row(self, evaluation_id: int) -> EvaluationRow:
        return self._rows[evaluation_id]

    def terms(self, evaluation_id: int) -> SetTerms:
        """The terms of an evaluation's set; those of its row, if the configuration has the set no more."""
        row = self._rows[evaluation_id]
        found = self._all.get(row.name)
        return found or SetTerms(name=row.name, every_batches=0, num_tasks=row.num_tasks, samples=row.samples)

    def decides(self, row: EvaluationRow) -> bool:
        """Whether the row's set is the one by which the best checkpoint is chosen."""
        terms = self._all.get(row.name)
        return terms is not None and (bool(terms.best_by) or not row.name)

    def scores(self) -> list[VersionScore]:
        """Every evaluation that decides, for the learner; of very many the best ones, and the one under way."""

        def worth(row: EvaluationRow) -> tuple[bool, bool, float]:
            return row.status == "open", row.score is not None, row.score or 0.0

        deciding = [row for row in self._rows.values() if self.decides(row)]
        return [score_of(row) for row in sorted(deciding, key=worth)[-MAX_EVALUATIONS:]]

    @property
    def final_is_missing(self) -> bool:
        """Whether the run still waits for a final evaluation."""
        last = {row.name for row in self._rows.values() if row.batch >= self._num_batches and row.status == "done"}
        return not self._sets.keys() <= last

    def due(self, newest: VersionRow | None) -> list[SetTerms]:
        """The sets on which the newest weights should be evaluated now."""
        if newest is None:
            return []
        batch = newest.trained_batches
        known = {row.name for row in self._rows.values() if row.status == "open" or row.batch == batch}
        return [
            terms
            for terms in self._sets.values()
            if terms.name not in known and (batch % terms.every_batches == 0 or batch >= self._num_batches)
        ]

    def start(self, terms: SetTerms, newest: VersionRow) -> EvaluationRow:
        row = EvaluationRow(
            evaluation_id=max(self._rows, default=-1) + 1,
            policy_version=newest.policy_version,
            batch=newest.trained_batches,
            num_tasks=terms.num_tasks,
            name=terms.name,
            samples=terms.samples,
        )
        self._rows[row.evaluation_id] = row
        return row

    def close(
        self, evaluation_id: int, tasks: Mapping[int, Sequence[TrajectoryRow]]
    ) -> tuple[EvaluationRow, list[dict[str, Any]]]:
        """Close an evaluation whose trajectories all finished or failed; returns it and its lines for metrics.jsonl.

        ``tasks``: the trajectories by task. A failed one is counted, never as a reward of 0.
        """
        terms = self.terms(evaluation_id)
        finished = {index: [row for row in rows if row.status == "finished"] for index, rows in tasks.items()}
        estimates = _estimates(terms, finished)
        rewards = [row.reward for rows in finished.values() for row in rows]
        row = replace(
            self._rows[evaluation_id],
            status="done",
            reward=sum(rewards) / len(rewards) if rewards else None,
            num_finished=len(rewards),
            num_failed=sum(map(len, tasks.values())) - len(rewards),
        )
        if not row.name:
            row = replace(row, score=row.reward)
        elif terms.best_by:
            row = replace(row, score=next((_comparable(each) for each in estimates if each.metric == terms.best_by), None))
        self._rows[evaluation_id] = row
        lines = [_set_line(row, estimates, finished)] if row.name else []
        if row.name:
            self.latest[row.name] = estimates
        return row, [*lines, *([_held_out_line(row, terms, finished)] if self.decides(row) else [])]


def score_of(row: EvaluationRow) -> VersionScore:
    """What the learner hears of an evaluation."""
    return VersionScore(row.policy_version, row.status == "open", row.score)


def _estimates(terms: SetTerms, finished: Mapping[int, Sequence[TrajectoryRow]]) -> list[Estimate]:
    tasks = [
        TaskSamples(
            rewards=[row.reward for row in rows],
            solved=[row.reward >= terms.solved_at for row in rows],
            answers=[None] * len(rows),
            rating=terms.ratings[index] if index < len(terms.ratings) else None,
        )
        for index, rows in sorted(finished.items())
    ]
    return [estimate(name, tasks) for name in terms.metrics]


def _comparable(found: Estimate) -> float | None:
    """Count a rating without a maximum as its bound, so that solving everything beats solving less."""
    return next((value for value in (found.value, found.low, found.high) if value is not None), None)


def _set_line(
    row: EvaluationRow, estimates: Sequence[Estimate], finished: Mapping[int, Sequence[TrajectoryRow]]
) -> dict[str, Any]:
    """The result of a named set: each metric with its interval, and what its samples have cost."""
    prefix = f"eval/{row.name}/"
    rows = [each for of_task in finished.values() for each in of_task]
    line: dict[str, Any] = {"event": "evaluation", "set": row.name, **_common(row), "num_tasks": row.num_tasks}
    for each in estimates:
        line |= {f"{prefix}{each.metric}": each.value}
        line |= {f"{prefix}{each.metric}_low": each.low, f"{prefix}{each.metric}_high": each.high}
    if rows:
        sampled = sum(each.num_action_tokens for each in rows)
        line |= {f"{prefix}num_action_tokens": sampled, f"{prefix}num_tokens": sum(each.num_tokens for each in rows)}
        line |= {f"{prefix}versions_newer": _versions_newer(row, rows)}
        line |= length_stats(rows).line(prefix)
    return line


def _versions_newer(row: EvaluationRow, rows: Sequence[TrajectoryRow]) -> float:
    """By how many versions the sampled tokens are on average newer than the evaluated weights: engines update meanwhile."""
    sampled = sum(each.num_action_tokens for each in rows)
    return max(0.0, sum(each.version_sum for each in rows) / sampled - row.policy_version) if sampled else 0.0


def _held_out_line(row: EvaluationRow, terms: SetTerms, finished: Mapping[int, Sequence[TrajectoryRow]]) -> dict[str, Any]:
    """The line that curves of the held-out reward are drawn from: of the set that decides which checkpoint is the best."""
    line: dict[str, Any] = {"event": "eval", "eval/reward": row.reward, **_common(row)}
    if row.name:
        line |= {"set": row.name, "metric": terms.best_by, "eval/score": row.score}
    rows = [each for of_task in finished.values() for each in of_task]
    if rows:
        # Samples of one task are correlated; tasks are independent.
        means = [sum(each.reward for each in of_task) / len(of_task) for of_task in finished.values() if of_task]
        line |= {"eval/reward_error": standard_error(means), "eval/versions_newer": _versions_newer(row, rows)}
        line |= length_stats(rows).line("eval/")
    return line


def _common(row: EvaluationRow) -> dict[str, Any]:
    return {
        "policy_version": row.policy_version,
        "batch": row.batch,
        "num_finished": row.num_finished,
        "num_failed": row.num_failed,
    }
