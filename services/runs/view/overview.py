"""The curves of a run: one column a measure, one point a batch. They are read once, then only what is new."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from gspo_services.runs.metrics import BatchPace, Row, number, or_none, set_scores
from gspo_services.runs.reading import MetricsLines
from gspo_services.shared.learning import LearningWatch

LAGS: Final = ("lag_0", "lag_1", "lag_2", "lag_3_4", "lag_5_up")
MEASURES: Final = {
    "reward": "reward_mean",
    "reward_std": "reward_std",
    "lag_mean": "lag/all",
    "lag_max": "lag/max",
    "clip": "clip_fraction/all",
    "entropy": "entropy/all",
    "mismatch": "mismatch_kl/all",
    "tokens_per_s": "tokens_per_s",
    "loss": "loss",
    "grad_norm": "grad_norm",
    "zero_advantage_groups": "num_zero_advantage_groups",
    "filtered": "num_filtered_groups",
    "num_tokens": "num_tokens",
    "num_action_tokens": "num_action_tokens",
    "num_trajectories": "num_trajectories",
    "train_s": "train_s",
    "policy_version": "policy_version",
    "time": "time",
    **{f"clip_{lag}": f"clip_fraction/{lag}" for lag in LAGS},
    **{f"sequences_{lag}": f"sequences/{lag}" for lag in LAGS},
}
"""The columns, and their names in metrics.jsonl."""
MOST_POINTS: Final = 1000
EVENTS: Final = ("dropped", "filter_limit", "quarantined", "requeued", "batch_skipped")
MOST_EVENTS: Final = 2000


class Curves:
    """The lines of metrics.jsonl as columns. Memory grows with the number of batches: some 300 bytes each."""

    def __init__(self, begin_watch: Callable[[], LearningWatch] = LearningWatch) -> None:
        """``begin_watch``: makes a watch over the run's learning."""
        self._begin_watch = begin_watch
        self.learning = begin_watch()
        self._last = 0
        self._columns: dict[int, list[float | None]] = {}
        self.evaluations: dict[int, dict[str, Any]] = {}
        """The finished evaluations, by batch."""
        self.sets: dict[str, dict[str, Any]] = {}
        """The newest result of each named evaluation set."""
        self.events: list[dict[str, Any]] = []
        """The newest drops and batches quarantined, skipped or requeued, oldest first."""
        self.newest: tuple[float, float] | None = None
        """Of the newest line: its time, and the seconds since the run began."""
        self.pace = BatchPace()
        self.dropped: dict[str, int] = {}
        """Groups that were dropped, by reason."""

    def read(self, lines: MetricsLines) -> None:
        """Add what is new in the ledger. Raises: StoreCorrupt."""
        if lines.last < self._last:
            # Another run has the directory now, or this one stands as it did before.
            self.__init__(self._begin_watch)  # type: ignore[misc]
        self.take(lines.after(self._last))

    def take(self, lines: Iterable[Row]) -> None:
        """Add lines that were not added yet."""
        for line in lines:
            self.learning.take(line)
            number, event = line.get("line"), line.get("event")
            self._last = max(self._last, number if isinstance(number, int) else 0)
            batch = line.get("batch")
            time, time_s = _plain(line, "time"), _plain(line, "time_s")
            if time is not None and time_s is not None:
                self.newest = time, time_s
            if event == "batch" and isinstance(batch, int):
                # For a batch that was trained again, the last training counts.
                self.pace.take(batch, math.nan if time_s is None else time_s)
                self._columns[batch] = [_plain(line, source) for source in MEASURES.values()]
            elif event == "eval" and isinstance(batch, int):
                names = ("batch", "policy_version", "eval/reward", "num_finished", "num_failed", "time")
                self.evaluations[batch] = {name.rpartition("/")[2]: _plain(line, name) for name in names}
            elif event == "evaluation":
                scores = set_scores(line)
                shown = {name: [or_none(each) for each in found] for name, found in scores.metrics.items()}
                self.sets[scores.name] = {
                    "set": scores.name, "batch": scores.batch, "policy_version": scores.policy_version, "metrics": shown,
                    "num_action_tokens": _plain(line, f"eval/{scores.name}/num_action_tokens"),
                }  # fmt: skip
            elif event in EVENTS:
                self._event(str(event), line)

    def _event(self, event: str, line: Row) -> None:
        reason = str(line.get("reason", ""))[:200]
        if event == "dropped":
            self.dropped[reason] = self.dropped.get(reason, 0) + 1
        fields = ("time", "batch", "group_id", "policy_version")
        self.events.append({"event": event, "reason": reason, **{name: _plain(line, name) for name in fields}})
        if len(self.events) > MOST_EVENTS:
            del self.events[: MOST_EVENTS // 4]

    @property
    def last_batch(self) -> Mapping[str, float | None]:
        """Return the newest batch's measures; empty before the first."""
        if not self._columns:
            return {}
        return dict(zip(MEASURES, self._columns[max(self._columns)], strict=True))

    def plain(self, most: int = MOST_POINTS) -> dict[str, Any]:
        """Return the columns for the page, with at most ``most`` points: means of neighbours if there are more batches."""
        batches = sorted(self._columns)
        width = max(1, math.ceil(len(batches) / most))
        bins = [batches[at : at + width] for at in range(0, len(batches), width)]
        columns: dict[str, list[float | None]] = {"batch": [float(each[0]) for each in bins]}
        for place, name in enumerate(MEASURES):
            columns[name] = [_mean([self._columns[batch][place] for batch in each]) for each in bins]
        return {
            "columns": columns,
            "batches_per_point": width,
            "evaluations": list(self.evaluations.values()),
            "sets": list(self.sets.values()),
        }


def _plain(line: Row, key: str) -> float | None:
    return or_none(number(line, key))


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
