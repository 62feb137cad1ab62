"""Each broker's line of metrics about a batch is that of the whole batch, whatever its own share was."""
# ruff: noqa: B023 - the text of a violation is made at once

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from tests.simulation.audit.books import Shared
from tests.simulation.audit.broker import BrokerAudit

LINES = "several brokers: a line of metrics is that of the whole batch"


class Lines:
    """Counts for itself what a line must say."""

    def __init__(self, shared: Shared, brokers: Sequence[BrokerAudit]) -> None:
        self._shared = shared
        self._brokers = brokers
        self._expected: defaultdict[int, list[dict[str, float]]] = defaultdict(list)
        """By batch: what a line may say; several where the batch was trained again without a share, or with other groups."""

    def expect(self, index: int, numbers: Collection[int]) -> None:
        """A batch is trained with the shares of these brokers."""
        rows = [self._brokers[number].durable.batches[index] for number in sorted(numbers)]
        members = [
            self._brokers[number].members(group_id)
            for number, batch in zip(sorted(numbers), rows, strict=True)
            for group_id in batch.group_ids
        ]
        trajectories = [row for group in members for row in group]
        if not trajectories:
            return
        self._expected[index].append(
            {
                "num_trajectories": len(trajectories),
                "num_tokens": sum(row.num_tokens for row in trajectories),
                "num_action_tokens": sum(row.num_action_tokens for row in trajectories),
                "num_zero_advantage_groups": sum(len({row.reward for row in group}) == 1 for group in members),
                "num_filtered_groups": sum(batch.stats.num_filtered_groups for batch in rows),
                "num_filtered_tokens": sum(batch.stats.num_filtered_tokens for batch in rows),
                "train/reward": sum(row.reward for row in trajectories) / len(trajectories),
                "length/max": max(row.num_action_tokens for row in trajectories),
                "lag/max": max(batch.stats.max_lag for batch in rows),
                "lag/mean": sum(batch.stats.mean_lag * batch.stats.num_trajectories for batch in rows) / len(trajectories),
            }
        )

    def compare(self, number: int, lines: Iterable[Mapping[str, object]]) -> None:
        """``lines``: of broker ``number``."""
        for line in lines:
            if line["event"] != "batch":
                continue
            index = line["batch"]
            assert isinstance(index, int)
            self._shared.require(
                any(_says(line, expected) for expected in self._expected[index]),
                LINES,
                lambda: f"broker {number}, batch {index}: {line}; expected was one of {self._expected[index]}",
            )


def _says(line: Mapping[str, object], expected: Mapping[str, float]) -> bool:
    for name, value in expected.items():
        said = line.get(name)
        if not isinstance(said, int | float) or not math.isclose(said, value, rel_tol=1e-9, abs_tol=1e-12):
            return False
    return True
