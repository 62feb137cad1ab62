"""A line of metrics about a batch is that of the batch, counted again."""
# ruff: noqa: B023 - the text of a violation is made at once

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping

from tests.simulation.audit.books import Books, Rules, Violation

LINES = "a line of metrics is that of its batch"


class LinesAudit(Books):
    """Counts for itself what a line must say."""

    def __init__(self, rules: Rules, happened: Counter[str], report: Callable[[Violation], None]) -> None:
        super().__init__(rules, happened, report)
        self._expected: defaultdict[int, list[dict[str, float]]] = defaultdict(list)
        """By batch: what a line may say; several where the batch was trained again with other groups."""

    def expect_line(self, index: int) -> None:
        """A batch is trained."""
        batch = self.durable.batches[index]
        members = [self.members(group_id) for group_id in batch.group_ids]
        trajectories = [row for group in members for row in group]
        self._expected[index].append(
            {
                "num_trajectories": len(trajectories),
                "num_tokens": sum(row.num_tokens for row in trajectories),
                "num_action_tokens": sum(row.num_action_tokens for row in trajectories),
                "num_zero_advantage_groups": sum(len({row.reward for row in group}) == 1 for group in members),
                "num_filtered_groups": batch.stats.num_filtered_groups,
                "num_filtered_tokens": batch.stats.num_filtered_tokens,
                "train/reward": sum(row.reward for row in trajectories) / len(trajectories),
                "length/max": max(row.num_action_tokens for row in trajectories),
                "lag/max": batch.stats.max_lag,
                "lag/mean": batch.stats.mean_lag,
            }
        )

    def lines_are_whole(self, lines: Iterable[Mapping[str, object]]) -> None:
        """The broker has written these lines of metrics."""
        for line in lines:
            if line["event"] != "batch":
                continue
            index = line["batch"]
            assert isinstance(index, int)
            self.require(
                any(_says(line, expected) for expected in self._expected[index]),
                LINES,
                lambda: f"batch {index}: {line}; expected was one of {self._expected[index]}",
            )


def _says(line: Mapping[str, object], expected: Mapping[str, float]) -> bool:
    for name, value in expected.items():
        said = line.get(name)
        if not isinstance(said, int | float) or not math.isclose(said, value, rel_tol=1e-9, abs_tol=1e-12):
            return False
    return True
