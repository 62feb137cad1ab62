"""Dynamic sampling filters out what it should, no more than it may, and says so."""

from collections.abc import Sequence

from gspo_services.broker.ledger.sampling import MOST_PASSED_OVER
from gspo_services.broker.rows import BatchRow, GroupRow, Row, TaskRow
from tests.simulation.audit.books import Books

ZERO_ADVANTAGE = "sampling: what is filtered out has zero advantage"
BOUNDED = "sampling: a batch filters out no more than it may"
SIFTED = "sampling: a zero-advantage group is filtered out while it may be"
AWAKE = "sampling: a prompt has the next task that does not rest"
RESTS = "sampling: a task rests after zero-advantage groups in a row"
COUNTED = "sampling: what is filtered out is counted"


class SamplingAudit(Books):
    """Checks the groups of each transaction."""

    @property
    def num_filtered_out(self) -> int:
        """Groups that were filtered out, as the batches and the run count them."""
        return self.durable.run.filtered_groups + sum(
            batch.stats.num_filtered_groups for batch in self.durable.batches.values()
        )

    def sifted(self, rows: Sequence[Row], num_counted: int) -> None:
        """A transaction with these rows is durable; the counts have grown by ``num_counted``."""
        self._drawn(rows)
        groups = [row for row in rows if isinstance(row, GroupRow)]
        filtered = [group for group in groups if group.status == "filtered"]
        for group in filtered:
            self.happened["group filtered out"] += 1
            self.require(
                not self._rewards_differ(group),
                ZERO_ADVANTAGE,
                lambda group=group: f"{group}: {self.members(group.group_id)}",
            )
        self.require(
            num_counted == len(filtered),
            COUNTED,
            lambda: f"{len(filtered)} groups were filtered out, {num_counted} more are counted",
        )
        count, most = self.durable.run.filtered_groups, self.rules.max_filtered
        self.require(count <= most, BOUNDED, lambda: f"{count} groups were filtered out for one batch, {most} may be")
        self.happened["filter limit"] += bool(filtered) and count == most
        if any(isinstance(row, BatchRow) for row in rows):
            return  # The count has begun again meanwhile.
        for group in groups:
            is_new = (group.split, group.status) == ("train", "complete") and group.group_id not in self.requeued
            self.require(
                not is_new or count == most or self._is_settled(group.group_id) or self._rewards_differ(group),
                SIFTED,
                lambda group=group: f"{count} of {most} groups are filtered out, and {group} has zero advantage",
            )

    def _drawn(self, rows: Sequence[Row]) -> None:
        """Each new prompt has the next task that does not rest."""
        durable = self.durable
        num_batches = len(durable.batches) - sum(isinstance(row, BatchRow) for row in rows)
        for row in rows:
            if isinstance(row, BatchRow):
                num_batches += 1
            elif isinstance(row, TaskRow):
                self._judged(row, num_batches)
                durable.tasks[row.task_index] = row
            elif isinstance(row, GroupRow) and self._is_new_prompt(row):
                self._draw(row, num_batches)

    def _is_new_prompt(self, row: GroupRow) -> bool:
        return row.split == "train" and row.replaces is None and row.prompt >= self.durable.num_prompts

    def _draw(self, group: GroupRow, num_batches: int) -> None:
        """What a prompt gets, counted again."""
        durable, resting = self.durable, self._resting(num_batches)
        draw = durable.num_prompts + durable.num_passed_over
        if len(resting) == self.rules.num_tasks:
            self.happened["all tasks rest"] += 1
            _, expected = min(resting)
            passed_over = MOST_PASSED_OVER - 1
        else:
            asleep = {task_index for _, task_index in resting}
            passed_over = 0
            while self.order.task_index(draw + passed_over) in asleep:
                passed_over += 1
            expected = self.order.task_index(draw + passed_over)
        self.happened["task passed over"] += passed_over > 0
        durable.num_prompts += 1
        durable.num_passed_over += passed_over
        self.require(
            group.task_index == expected,
            AWAKE,
            lambda: f"{group} at {num_batches} batches, expected was task {expected}; resting are {resting}",
        )

    def _resting(self, num_batches: int) -> list[tuple[int, int]]:
        """When each of the tasks that rest is back."""
        rows = self.durable.tasks.values() if self.rules.rest_after_groups else ()
        return [(row.rests_until, row.task_index) for row in rows if row.rests_until > num_batches]

    def _judged(self, row: TaskRow, num_batches: int) -> None:
        """What is known of a task changes by one group at a time."""
        former = self.durable.tasks.get(row.task_index, TaskRow(task_index=row.task_index))
        most = self.rules.rest_after_groups
        begins = row.rests_until > former.rests_until
        self.happened["task rests"] += begins
        steps = {(0, former.rests_until), (former.num_zero_advantage + 1, former.rests_until)}
        if former.num_zero_advantage + 1 == most:
            steps = {(0, former.rests_until), (0, num_batches + self.rules.rest_batches)}
        self.require(
            most > 0 and (row.num_zero_advantage, row.rests_until) in steps,
            RESTS,
            lambda: f"{former} becomes {row} at {num_batches} batches",
        )

    def _is_settled(self, group_id: int) -> bool:
        """It was filtered out in the transaction in which it became complete."""
        return self.durable.groups[group_id].status == "filtered"

    def _rewards_differ(self, group: GroupRow) -> bool:
        return len({row.reward for row in self.members(group.group_id)}) > 1
