"""Watches a run's lines one by one, and says what keeps it from learning. Pure; its memory does not grow."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from gspo_services.shared.learning.findings import BOUNDS, FindingName, LearningFinding, Row
from gspo_services.shared.learning.outcome import Constant, LearningOutcome, Tasks, held_out_outcome, training_outcome
from gspo_services.shared.learning.rules import ALL, LEVEL, NAMED, RULES, Past, is_silent, mean, measure

KEPT: Final = max(LEVEL, *(bound.batches for bound in BOUNDS.values()))


class LearningWatch:
    """Give it every line of metrics.jsonl in order (``take``); ``findings`` are those that hold now."""

    def __init__(self, counted: Iterable[str] | None = None) -> None:
        """``counted``: the components that count in the reward, ALL for all; None: unknown, and nothing is said of them."""
        self._newest: deque[Row] = deque(maxlen=KEPT)
        self._oldest: list[Row] = []
        self._past = Past(counted=None if counted is None else frozenset(counted))
        self._since: dict[FindingName, int] = {}
        self._evaluations: dict[str, tuple[Row, Row]] = {}
        """The first and the last line of each set with a reward; "": of the held-out tasks."""
        self._constant = Constant()
        self.findings: list[LearningFinding] = []
        """What is wrong, as of the newest batch."""

    def take(self, row: Row) -> None:
        """Take the next line. A batch that is trained again after a restart is known."""
        event, batch = row.get("event"), row.get("batch")
        if not isinstance(batch, int):
            return
        if event in ("eval", "evaluation"):
            self._evaluated(row)
        elif event == "batch" and (not self._newest or batch > self._newest[-1]["batch"]):
            self._trained(row)
        else:
            return
        self._judge()

    @property
    def num_batches(self) -> int:
        """How many batches it has taken."""
        return self._constant.num_batches

    @property
    def evaluations(self) -> tuple[Row, Row] | None:
        """The lines of the first and the last evaluation that can be compared; None without two."""
        chosen = self._evaluations.get("") or next(iter(self._evaluations.values()), None)
        if chosen is not None and "eval/reward" in chosen[-1]:
            # The line of its set has the interval.
            chosen = self._evaluations.get(str(chosen[-1].get("set")), chosen)
        return chosen if chosen is not None and chosen[0]["batch"] < chosen[-1]["batch"] else None

    def outcome(self, tasks: Tasks | None = None) -> LearningOutcome:
        """Whether the reward rose: held out between the first evaluation and the last, else in training.

        ``tasks``: the rewards of these two ``evaluations`` by task, where they are known: then tasks are compared in pairs.
        """
        if self._constant.text:
            return LearningOutcome(kind="no", text=self._constant.text)
        if self.evaluations is not None:
            return held_out_outcome(*self.evaluations, tasks)
        return training_outcome(self._oldest, list(self._newest), self._constant.num_batches)

    @property
    def not_measured(self) -> list[str]:
        """What the lines do not say."""
        found = ["repeated text within an answer"]
        last: Row = self._newest[-1] if self._newest else {}
        names = {
            "entropy": "entropy/all",
            "answers cut off": "length/cut_off",
            "mismatch of engine and learner": "mismatch_sigma",
        }
        found += [what for what, name in names.items() if measure(last, name) != measure(last, name)]
        if self._past.counted is None and sum(key.startswith("train/reward/") for key in last) > 1:
            found.append("single components of the reward, because their weights are not known here")
        return found

    def _trained(self, row: Row) -> None:
        past = self._past
        self._constant.trained(row)
        self._newest.append(row)
        past.first = past.first or [row]
        if len(self._oldest) < LEVEL:
            self._oldest.append(row)
        if len(self._newest) >= LEVEL:
            level = mean(list(self._newest)[-LEVEL:], "reward_mean")
            past.best_reward = max(past.best_reward, level)
        if not is_silent(row):
            past.silent, past.num_silent, past.num_silent_groups, past.had_signal = [], 0, 0.0, True
            return
        past.num_silent += 1
        groups = measure(row, "groups/all")
        past.num_silent_groups += groups if groups > 0 else 0
        past.silent = [*past.silent[:1], *past.silent[1:][-NAMED:], row]

    def _evaluated(self, row: Row) -> None:
        is_named = row["event"] == "evaluation"
        reward = measure(row, f"eval/{row.get('set')}/reward" if is_named else "eval/reward")
        if reward != reward:
            return
        name = str(row.get("set")) if is_named else ""
        self._evaluations[name] = (self._evaluations.get(name, (row,))[0], row)
        self._constant.evaluated(reward)
        if is_named:
            return
        past, most = self._past, BOUNDS["held_out_falls"].batches
        best = past.evaluations[0] if past.evaluations else None
        if best is None or reward > measure(best, "eval/reward"):
            past.evaluations = [row]
            past.reward_at_best = mean(list(self._newest)[-LEVEL:], "reward_mean")
        else:
            past.evaluations = [best, *past.evaluations[1:][-(most - 1) :], row]

    def _judge(self) -> None:
        newest = list(self._newest)
        self.findings = []
        for name, rule in RULES.items():
            size = BOUNDS[name].batches
            is_possible = len(newest) >= size and (name != "held_out_falls" or bool(self._past.evaluations))
            found = rule(newest[-size:], self._past) if is_possible else None
            if found is None:
                self._since.pop(name, None)
            else:
                since = self._since.setdefault(name, found.since)
                self.findings.append(replace(found, since=min(since, found.since)))


def watched(rows: Iterable[Row], counted: Iterable[str] | None = None) -> LearningWatch:
    """A watch that has taken these lines."""
    watch = LearningWatch(counted)
    for row in rows:
        watch.take(row)
    return watch


def counted_components(
    environment: Mapping[str, object], group_weights: Mapping[str, float] | None
) -> frozenset[str] | None:
    """The components with a positive weight, from ``environment.options`` and ``reward.group_weights``; None: unknown."""
    weights = group_weights if group_weights is not None else environment.get("reward_weights")
    if isinstance(weights, Mapping):
        return frozenset(str(name) for name, weight in weights.items() if isinstance(weight, int | float) and weight > 0)
    # A function of (completion, task) is worth the sum of its components.
    return frozenset({ALL}) if environment.get("reward") and not environment.get("reward_form") else None
