"""What happens in a run, a line for each event that matters: restarts, drops, evaluations, checkpoints, late versions."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from gspo_services.cli.run.supervisor import Child
from gspo_services.runs.metrics import HeldOut, Row, best_evaluation, held_out, number, set_scores
from gspo_services.runs.track import Cursor
from gspo_services.shared.learning import FindingName, LearningWatch

MOST_SAID: Final = 300
"""Characters of an error that a process ended with; its log has all."""


@dataclass(frozen=True, kw_only=True)
class Happening:
    """One line."""

    text: str
    is_problem: bool = False
    """Somebody may need to look: it is shown even without progress."""


class Happenings:
    """Finds out what is new since the last look."""

    def __init__(self, max_lag: int, learning: LearningWatch | None = None) -> None:
        """``learning``: the run's; None: one that does not know which components of the reward count."""
        self._max_lag = max_lag
        self._learning = LearningWatch() if learning is None else learning
        self._told: set[FindingName] = set()
        self._restarts: Counter[str] = Counter()
        self._given_up: set[str] = set()
        self._checkpointed: int | None = None
        self._late: set[str] = set()
        self._dropped = 0
        self._best: HeldOut | None = None
        self._errors: dict[str, str] = {}

    def skip(self, rows: Sequence[Row]) -> None:
        """Skip what happened before this command was started."""
        self.of_rows(rows)

    def of_rows(self, rows: Sequence[Row]) -> list[Happening]:
        """Return the events in new rows of metrics.jsonl."""
        found = []
        dropped: Counter[str] = Counter()
        for row in rows:
            found += self._watched(row)
            match row.get("event"):
                case "eval" if isinstance(row.get("set"), str):
                    found += self._best_of_set(row)
                case "eval":
                    found.append(self._evaluation(row))
                case "evaluation":
                    found += _set_evaluated(row)
                case "dropped":
                    dropped[str(row.get("reason"))] += 1
                case "filter_limit":
                    found.append(self._limit_reached(row))
                case "level":
                    rate = number(row, "solve_rate")
                    text = f"{row.get('ladder')} is at level {row.get('level')}: the solve rate was {rate:.2f}"
                    found.append(Happening(text=text))
                case "quarantined":
                    text = f"batch {row.get('batch')} was quarantined: {row.get('reason')}; `gspo requeue` lists them"
                    found.append(Happening(text=text, is_problem=True))
                case "requeued":
                    found.append(Happening(text=f"batches were requeued: {row.get('batches')}"))
                case "batch" if row.get("again"):
                    found.append(Happening(text=f"batch {row.get('batch')} was trained again after a restart"))
        for reason, groups_lost in dropped.items():
            self._dropped += groups_lost
            groups = "1 group was" if groups_lost == 1 else f"{groups_lost} groups were"
            found.append(Happening(text=f"{groups} dropped: {reason} ({self._dropped} in all)", is_problem=True))
        return found

    def _watched(self, row: Row) -> list[Happening]:
        """Report what keeps the run from learning once it is seen, and again after it had passed."""
        self._learning.take(row)
        now = {each.name: each for each in self._learning.findings}
        new = [each for name, each in now.items() if name not in self._told]
        self._told = set(now)
        return [
            Happening(text=text, is_problem=each.is_wrong)
            for each in new
            for text in (f"{each.text}, since batch {each.since}", each.advice)
        ]

    def _limit_reached(self, row: Row) -> Happening:
        text = (
            f"{row.get('num_groups')} zero-advantage groups were filtered out for batch {row.get('batch')}, the most that "
            "data.max_filtered allows, and it takes what there is: are the tasks too easy, or too hard?"
        )
        return Happening(text=text, is_problem=True)

    def _evaluation(self, row: Row) -> Happening:
        found, failed = held_out(row), number(row, "num_failed")
        lost = f"; {failed:.0f} tasks failed" if failed > 0 else ""
        if found is None:
            return Happening(text=f"evaluation after {row['batch']} batches: no task was finished{lost}", is_problem=True)
        interval = "" if math.isnan(found.half_interval) else f" ± {found.half_interval:.3f}"
        mark = ", the best so far" if self._is_best(found) else ""
        text = f"evaluation after {found.batch} batches: {found.reward:.3f}{interval}{mark}{_blur(row, 'eval/')}{lost}"
        return Happening(text=text)

    def _is_best(self, found: HeldOut) -> bool:
        self._best = best_evaluation(filter(None, (self._best, found)))
        return self._best is found

    def _best_of_set(self, row: Row) -> list[Happening]:
        """Report the score that chooses the best checkpoint, if it is the best so far; the set's own line has the rest."""
        found = held_out(row)
        if found is None or math.isnan(number(row, "eval/score")) or not self._is_best(found):
            return []
        name = found.metric.removeprefix("eval/")
        return [Happening(text=f"{name} after {found.batch} batches is the best so far: {found.score:.4g}")]

    def of_processes(self, children: Sequence[Child]) -> list[Happening]:
        """Return restarts, and processes that are given up."""
        found = []
        for child in children:
            name = child.spec.name
            if child.num_restarts > self._restarts[name]:
                self._restarts[name] = child.num_restarts
                why = f"ended with status {child.last_status}" if child.last_status is not None else "ended"
                said, _, _ = f": {child.said}".partition("\n") if child.said else ("", "", "")
                text = f"{name} {why} and is restarted ({child.num_restarts}){said[:MOST_SAID]}"
                found.append(Happening(text=text, is_problem=True))
            if child.given_up and name not in self._given_up:
                self._given_up.add(name)
                found.append(Happening(text=f"{name} is not restarted: {child.given_up}", is_problem=True))
        return found

    def of_status(self, status: dict[str, Any]) -> list[Happening]:
        """Return new checkpoints, and rollouts whose tokens are too old to train on."""
        found = []
        covered = status["batches_checkpointed"]
        if self._checkpointed is not None and covered > self._checkpointed:
            found.append(Happening(text=f"checkpoint saved; it covers {covered} batches"))
        self._checkpointed = covered
        late = {
            rollout["peer"]: rollout["policy_version"]
            for rollout in status["rollouts"]
            if rollout["status"] == "serving" and status["policy_version"] - rollout["policy_version"] > self._max_lag
        }
        for peer in late.keys() - self._late:
            newest = status["policy_version"]
            text = f"{peer} still serves version {late[peer]}, but the newest is {newest}: too old to train on"
            found.append(Happening(text=text, is_problem=True))
        for peer in self._late - late.keys():
            found.append(Happening(text=f"{peer} serves a new version again"))
        self._late = set(late)
        return found

    def of_tracker(self, name: str, cursor: Cursor | None) -> list[Happening]:
        """Report a tracker that refuses, or accepts lines again."""
        error, before = "" if cursor is None else cursor.error, self._errors.get(name, "")
        self._errors[name] = error
        if error and not before:
            return [Happening(text=f"tracker {name} refuses lines, training continues: {error}", is_problem=True)]
        if before and not error:
            return [Happening(text=f"tracker {name} accepts lines again")]
        return []


def _set_evaluated(row: Row) -> list[Happening]:
    """Report the result of a named set."""
    scores = set_scores(row)
    parts = []
    for metric, (value, low, high) in scores.metrics.items():
        known = [_shown(end) for end in (low, high) if not math.isnan(end)]
        interval = f" ({' to '.join(known)})" if len(known) == 2 else f" (beyond {known[0]})" if known else ""
        parts.append(f"{metric} {'-' if math.isnan(value) else _shown(value)}{interval}")
    tokens = number(row, f"eval/{scores.name}/num_action_tokens")
    cost = "" if math.isnan(tokens) else f"; {tokens:,.0f} tokens sampled"
    lost = f"; {scores.num_failed} samples failed" if scores.num_failed else ""
    blur = _blur(row, f"eval/{scores.name}/")
    text = f"{scores.name} after {scores.batch} batches: {', '.join(parts) or 'nothing measured'}{blur}{cost}{lost}"
    return [Happening(text=text, is_problem=not parts)]


def _blur(row: Row, prefix: str) -> str:
    """Say how much newer the tokens are than the evaluated weights; empty below half a version."""
    newer = number(row, f"{prefix}versions_newer")
    return f" (its tokens are {newer:.1f} versions newer on average)" if newer >= 0.5 else ""


def _shown(value: float) -> str:
    """Format a share, or a rating."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3f}"
