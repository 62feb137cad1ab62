"""Whether the reward rose over a run, with a 95 % interval. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from gspo_services.shared.eval_metrics import (
    Interval,
    change_interval,
    difference_interval,
    mean_interval,
    share_from,
    share_interval,
)
from gspo_services.shared.learning.findings import Row
from gspo_services.shared.learning.rules import LEVEL, measure

Kind = Literal["learned", "worse", "unclear", "no"]
_WORDS: Final[dict[Kind, str]] = {"learned": "learned", "worse": "worse", "unclear": "no change can be told"}


@dataclass(frozen=True, kw_only=True)
class LearningOutcome:
    """What a run has brought."""

    kind: Kind
    text: str
    change: Interval | None = None
    """Of the mean reward; None where there is none to compare, or no interval."""

    def __str__(self) -> str:
        return self.text


Tasks = tuple[Mapping[int, float], Mapping[int, float]]
"""The mean reward by task of two evaluations."""


def held_out_outcome(first: Row, last: Row, tasks: Tasks | None) -> LearningOutcome:
    """Compare two evaluations, by their lines of metrics.jsonl; task by task where ``tasks`` are known."""
    where = f"held-out reward after {first['batch']} and {last['batch']} batches"
    if tasks is not None and (shared := sorted(tasks[0].keys() & tasks[1].keys())):
        before, after = ([each[task] for task in shared] for each in tasks)
        return _told(where, *paired(before, after), f"{len(shared)} tasks, each compared with itself")
    one, other = _score(first), _score(last)
    return _told(where, one, other, change_interval(one, other), f"{measure(last, 'num_finished'):.0f} answers")


def training_outcome(oldest: Sequence[Row], newest: Sequence[Row], num_batches: int) -> LearningOutcome:
    """Compare the first batches with the last ones; both have LEVEL lines, or all of a shorter run."""
    size = min(LEVEL, num_batches // 2)
    if not size:
        return LearningOutcome(
            kind="unclear", text=f"{_WORDS['unclear']}: {num_batches} batches were trained, and no evaluations compared"
        )
    one, other = _level(oldest[:size]), _level(newest[-size:])
    if math.isnan(one.value + other.value):
        return LearningOutcome(kind="unclear", text=f"{_WORDS['unclear']}: the lines of the batches have no reward")
    where = f"training reward of the first {size} and the last {size} batches"
    return _told(where, one, other, change_interval(one, other), "nothing was held out twice")


@dataclass(kw_only=True)
class Constant:
    """Whether every answer had the same reward."""

    num_batches: int = 0
    num_answers: float = 0.0
    reward: float = math.nan
    varies: bool = False

    def trained(self, row: Row) -> None:
        """Take a batch."""
        self.num_batches += 1
        answers = measure(row, "num_trajectories")
        self.num_answers += answers if answers > 0 else 0
        self.varies |= not (measure(row, "reward_std") <= 1e-9)
        self.evaluated(measure(row, "reward_mean"))

    def evaluated(self, reward: float) -> None:
        """Take a mean of rewards."""
        self.reward = reward if math.isnan(self.reward) else self.reward
        self.varies |= not (abs(reward - self.reward) <= 1e-9)

    @property
    def text(self) -> str:
        """Say that the reward was the same; empty if it was not."""
        if self.varies or not self.num_batches:
            return ""
        return f"no: the reward was {self.reward:.4g} in all {self.num_answers:,.0f} answers of {self.num_batches} batches"


def paired(before: Sequence[float], after: Sequence[float]) -> tuple[Interval, Interval, Interval | None]:
    """Return the means of the same tasks before and after, and their change.

    Rewards in [0, 1]: ``change_interval`` of Wilson's intervals, with the correlation of the tasks' rewards. Others:
    Student's t of the differences, unless all are alike, which says nothing of other tasks.
    """
    if all(0 <= value <= 1 for value in (*before, *after)):
        one, other = share_interval(before, len(before)), share_interval(after, len(after))
        return one, other, change_interval(one, other, _correlation(before, after))
    one, other = mean_interval(before), mean_interval(after)
    is_alike = len({new - old for old, new in zip(before, after, strict=True)}) == 1
    return one, other, None if is_alike else difference_interval(before, after)


def _correlation(one: Sequence[float], other: Sequence[float]) -> float:
    middle, centre = (math.fsum(values) / len(values) for values in (one, other))
    product = math.fsum((a - middle) * (b - centre) for a, b in zip(one, other, strict=True))
    squares = math.fsum((a - middle) ** 2 for a in one) * math.fsum((b - centre) ** 2 for b in other)
    return max(-1.0, min(1.0, product / math.sqrt(squares))) if squares > 0 else 0.0


def _told(where: str, one: Interval, other: Interval, change: Interval | None, of: str) -> LearningOutcome:
    kind: Kind = "unclear"
    ends = "no interval"
    if change is not None and change.low is not None and change.high is not None:
        kind = "learned" if change.low > 0 else "worse" if change.high < 0 else "unclear"
        ends = f"change {change.value:+.3f}, 95 %: {change.low:+.3f} to {change.high:+.3f}"
    text = f"{_WORDS[kind]}: {one.value:.3f} -> {other.value:.3f} ({ends}; {where}, {of})"
    return LearningOutcome(kind=kind, text=text, change=change)


def _score(line: Row) -> Interval:
    """The reward of an evaluation's line."""
    if line["event"] == "evaluation":
        prefix = f"eval/{line['set']}/reward"
        low, high = measure(line, f"{prefix}_low"), measure(line, f"{prefix}_high")
        ends = (None, None) if math.isnan(low + high) else (low, high)
        return Interval(measure(line, prefix), *ends)
    number = max(1, int(measure(line, "num_finished")))
    return share_from(measure(line, "eval/reward"), measure(line, "eval/reward_error"), number)


def _level(batches: Sequence[Row]) -> Interval:
    """The training reward of some batches, each of which is one sample: its groups share a policy."""
    rewards = [value for row in batches if not math.isnan(value := measure(row, "reward_mean"))]
    if not rewards:
        return Interval(math.nan, None, None)
    groups = sum(value for row in batches if (value := measure(row, "groups/all")) > 0)
    in_range = all(0 <= value <= 1 for value in rewards)
    return share_interval(rewards, int(groups)) if in_range else mean_interval(rewards)
