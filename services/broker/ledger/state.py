"""The state that leases and training share: decides when the run ends, and what a failed attempt leads to."""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from gspo_protocol.limits import trajectory_limits
from gspo_protocol.messages import Evaluated, GroupSampling, LeaseEnded
from gspo_protocol.messages.base import shortened
from gspo_services.broker.ledger.actions import Action, Note, Reply, Save, SessionKey, WriteMetrics
from gspo_services.broker.ledger.admission import Admission, Window
from gspo_services.broker.ledger.batch_order import Batches
from gspo_services.broker.ledger.config import LedgerConfig
from gspo_services.broker.ledger.evaluations import Evaluations, SetTerms, score_of
from gspo_services.broker.ledger.group_states import Groups
from gspo_services.broker.ledger.lengths import passed
from gspo_services.broker.ledger.quarantine import IN_A_ROW, Failures, Quarantine, requeued_line
from gspo_services.broker.ledger.sampling import (
    MOST_PASSED_OVER,
    AddedTasks,
    Curriculum,
    Rests,
    SourceShare,
    TaskSchedule,
    has_advantage,
)
from gspo_services.broker.rows import DropReason, EvaluationRow, GroupRow, LedgerContents, Row, TrajectoryRow


class State:
    """The run as it stands."""

    def __init__(self, config: LedgerConfig, contents: LedgerContents) -> None:
        self.config = config
        self.admission = Admission(max_lag=config.max_lag, groups_per_batch=config.groups_per_batch)
        self.trajectory_limits = trajectory_limits(config.groups_per_batch * config.group_size)
        self.groups = Groups(contents)
        self.batches = Batches(contents)
        self.evaluations = Evaluations(
            contents,
            config.evaluation_sets
            or [SetTerms(every_batches=config.evaluate_every_batches, num_tasks=config.num_eval_tasks)],
            num_batches=config.num_batches,
        )
        self.failures = Failures(contents)
        self.quarantine = Quarantine(contents)
        one = () if config.num_train_tasks is None else (SourceShare(name="", weight=1.0, num_tasks=config.num_train_tasks),)
        self.schedule = TaskSchedule(config.seed, config.sources or one, contents.additions)
        self.rests = Rests(
            contents.tasks, after_groups=config.sampling.rest_after_groups, num_batches=config.sampling.rest_batches
        )
        self.curriculum = Curriculum(config.seed, config.ladders, contents.levels)
        self.next_prompt = contents.next_prompt
        self.num_batched_groups = contents.num_batched_groups
        self.num_dropped: dict[str, int] = dict(contents.num_dropped)
        self.num_filtered_groups = contents.num_filtered_groups
        # Tasks of ladders never come again.
        self.task_passes = {} if config.ladders else dict(contents.task_passes)
        begun_on = contents.run.begun_on or config.begun_on
        self.run = replace(contents.run, data_digest=config.data_digest, begun_on=begun_on)

    @property
    def stop_reason(self) -> str:
        """Why no further batch is assembled; empty while the run continues."""
        return self.run.stop_reason

    @property
    def oldest_allowed(self) -> int:
        """Oldest version whose tokens can go into the next batch."""
        return self.admission.oldest_allowed(self.batches.next_version)

    @property
    def num_wanted_groups(self) -> int:
        """How many more groups the rest of the run needs: no group is admitted without a batch for it."""
        batches_left = self.config.num_batches - self.batches.num_assembled
        return batches_left * self.config.groups_per_batch - self.groups.num_training

    @property
    def end_reason(self) -> str:
        """Why there is no further batch; empty while there is one."""
        if self.stop_reason:
            return self.stop_reason
        complete = self.batches.num_assembled >= self.config.num_batches
        if complete and self.batches.num_trained >= self.config.num_batches and not self.evaluations.final_is_missing:
            return f"all {self.config.num_batches} batches are trained"
        return ""

    @property
    def finished(self) -> bool:
        """Nothing is left to do: every assembled batch is trained, and no more will be assembled."""
        return bool(self.end_reason) and self.batches.num_trained >= self.batches.num_assembled

    def next_sampling(self, task_index: int) -> GroupSampling:
        """The sampling of a group that begins now with this task, for the batch after all groups under way."""
        sampling = self.config.schedules.sampling_at(
            self.batches.num_assembled + self.groups.num_training // self.config.groups_per_batch
        )
        return replace(sampling, adapter=self.config.adapter_of("train", task_index))

    def window(self) -> Window:
        """The admission window for the version of the next batch."""
        counted = self.groups.num_by_oldest_version(self.batches.newest_version)
        return Window(self.admission, counted, version=self.batches.next_version)

    # --- changes -----------------------------------------------------------------------------------------------------

    def start_group(self) -> tuple[int, list[Action]]:
        """Admit the next prompt, or one whose group was requeued too late; returns the group's id and the actions."""
        for shelved in self.quarantine.requeued:
            if shelved.oldest_version < self.oldest_allowed:
                former = self.quarantine.resample(shelved.group.group_id)
                group = self.groups.start(
                    "train",
                    former.prompt,
                    former.task_index,
                    self.config.group_size,
                    None,
                    sampling=self.next_sampling(former.task_index),
                    replaces=former.group_id,
                )
                return group.group_id, [Save(row=former), Save(row=group), *saves(self.groups.members(group.group_id))]
        task_index, passed_over = self._next_task()
        prompt = self.next_prompt
        self.next_prompt += 1
        size = self.config.group_size
        group = self.groups.start("train", prompt, task_index, size, None, sampling=self.next_sampling(task_index))
        return group.group_id, [Save(row=group), *saves(self.groups.members(group.group_id)), *passed_over]

    @property
    def next_draw(self) -> int:
        """The draw of the task schedule that comes next: each was taken by a prompt, or passed over."""
        return self.next_prompt + self.run.num_passed_over

    def _next_task(self) -> tuple[int, list[Action]]:
        """The next task that does not rest; if very many in a row do, the one of them that is back first."""
        draw, batch = self.next_draw, self.batches.num_assembled
        if self.curriculum.is_used:
            return self.curriculum.task_index(draw), []
        found: list[tuple[int, int]] = []
        for number in range(MOST_PASSED_OVER):
            task_index = self.schedule.task_index(draw + number)
            until = self.rests.rests_until(task_index)
            found.append((until, task_index))
            if until <= batch:
                break
        else:
            task_index = min(found)[1]
        num_passed_over = self.run.num_passed_over + len(found) - 1
        return task_index, self.change_run(num_passed_over=num_passed_over) if len(found) > 1 else []

    def note_passes(self, groups: Sequence[GroupRow], members: Sequence[Sequence[TrajectoryRow]]) -> None:
        """Remember how the tasks of a batch did, where tasks come again."""
        if self.config.num_train_tasks is not None:
            for group, rows in zip(groups, members, strict=True):
                self.task_passes[group.task_index] = passed(rows)

    def drop_group(self, group_id: int, reason: DropReason) -> list[Action]:
        """Never train on the group. Its lengths are recorded, because long episodes are dropped more often."""
        members = self.groups.members(group_id)
        row = self.groups.drop(group_id, reason)
        self.num_dropped[reason] = self.num_dropped.get(reason, 0) + 1
        line = {
            "event": "dropped",
            "reason": reason,
            "group_id": group_id,
            "prompt": row.prompt,
            "policy_version": self.batches.newest_version,
            "num_tokens": [member.num_tokens for member in members],
            "finished": [member.status == "finished" for member in members],
        }
        ended = [lease_ended(member, f"its group was dropped: {reason}") for member in members if member.status == "leased"]
        note = Note(event="group_dropped", fields={"group_id": group_id, "reason": reason}, level="warning")
        # Their rows may lag behind their chunks, and get no further chunks.
        whole = [Save(row=member) for member in members if member.status == "leased"]
        return [Save(row=row), *whole, *ended, WriteMetrics(line=line), note]

    def add_tasks(self, added: AddedTasks) -> list[Action]:
        """Add tasks to the training set. Raises: ValueError when the source does not exist."""
        row = self.schedule.add(added, self.next_draw)
        fields = {"number": row.number, "source": row.source, "name": row.name, "num_tasks": row.num_tasks}
        line = {"event": "data_added", **fields, "prompt": self.next_prompt, "batch": self.batches.num_assembled}
        return [Save(row=row), WriteMetrics(line=line), Note(event="data_added", fields=fields)]

    def sift(self, group_id: int) -> list[Action]:
        """Leave a group that is complete out of every batch if it teaches nothing, as long as the next batch may do so. Its
        task may rest.
        """
        rules, members = self.config.sampling, self.groups.members(group_id)
        group = self.groups.group(group_id)
        may_teach = has_advantage(members, rules, group.sampling.max_tokens)
        task_index = group.task_index
        judged = saves(self.rests.judge(task_index, self.batches.num_assembled, has_advantage=may_teach))
        judged += self._climb(task_index, members)
        if self.run.filtered_groups >= rules.max_filtered or may_teach:
            return judged
        row = self.groups.leave_out(group_id)
        self.num_filtered_groups += 1
        filtered = self.run.filtered_groups + 1
        line = {
            "event": "filtered",
            "reason": "zero_advantage",
            "group_id": group_id,
            "prompt": row.prompt,
            "task_index": row.task_index,
            "batch": self.batches.num_assembled,
            "policy_version": self.batches.newest_version,
            "reward": members[0].reward,
            "num_tokens": [member.num_tokens for member in members],
            "num_action_tokens": [member.num_action_tokens for member in members],
        }
        num_tokens = self.run.filtered_tokens + sum(member.num_tokens for member in members)
        changed = self.change_run(filtered_groups=filtered, filtered_tokens=num_tokens)
        note = Note(event="group_filtered", fields={"group_id": group_id, "reward": members[0].reward})
        actions = [*judged, Save(row=row), *changed, WriteMetrics(line=line), note]
        return [*actions, *self._filter_limit_reached()] if filtered == rules.max_filtered else actions

    def _climb(self, task_index: int, members: Sequence[TrajectoryRow]) -> list[Action]:
        """Count a complete group for the level of its task, which may change."""
        rows, line = self.curriculum.judge(task_index, members)
        if line is None:
            return saves(rows)
        line |= {"prompt": self.next_prompt, "batch": self.batches.num_assembled}
        fields = {name: line[name] for name in ("ladder", "level", "solve_rate")}
        return [*saves(rows), WriteMetrics(line=line), Note(event="level_changed", fields=fields)]

    def _filter_limit_reached(self) -> list[Action]:
        """The next batch may filter out no more groups: it takes zero-advantage groups, too, so that the run goes on."""
        fields = {"batch": self.batches.num_assembled, "num_groups": self.run.filtered_groups}
        note = Note(event="filter_limit", fields=fields, level="warning")
        return [WriteMetrics(line={"event": "filter_limit", **fields}), note]

    def take_back(self, window: Window) -> list[Action]:
        """Put requeued groups among the complete ones: those that are fresh, if ``window`` has room."""
        actions: list[Action] = []
        for shelved in self.quarantine.requeued:
            fresh = shelved.oldest_version >= self.oldest_allowed
            if self.num_wanted_groups <= 0 or not fresh or not window.add(shelved.oldest_version):
                continue
            back = self.quarantine.take_back(shelved.group.group_id)
            self.groups.take_back(back.group, back.members)
            actions += [Save(row=back.group), Note(event="group_taken_back", fields={"group_id": back.group.group_id})]
        return actions

    def reshelve(self, contents: LedgerContents) -> None:
        """Batches that a checkpoint covered are delivered again, and may be quarantined again."""
        self.failures = Failures(contents)
        self.quarantine = Quarantine(contents)

    def quarantine_batch(self, index: int, reason: str) -> list[Action]:
        """No learner gets the batch any more. The run goes on without it, unless that happens to one batch after another."""
        row, shelved = self.quarantine.add(index, self.batches.newest_version, reason)
        self.num_batched_groups -= len(shelved)
        line = {
            "event": "quarantined",
            "batch": index,
            "reason": row.reason,
            "policy_version": row.policy_version,
            "groups": [each.group.group_id for each in shelved],
            "num_tokens": [member.num_tokens for each in shelved for member in each.members],
        }
        fields = {"batch": index, "reason": row.reason, "num_groups": len(shelved)}
        note = Note(event="batch_quarantined", fields=fields, level="warning")
        actions = [Save(row=row), *(Save(row=each.group) for each in shelved), WriteMetrics(line=line), note]
        if self.quarantine.is_one_too_many(index) and not self.stop_reason:
            error = shortened(
                f"{IN_A_ROW} batches in a row were quarantined, so the fault is not in the data; the last one, batch "
                f"{index}, because {row.reason}"
            )
            actions += [*self.change_run(error=error), *self.stop(error)]
        return actions

    def requeue(self, indices: Sequence[int], by: str) -> list[Action]:
        """Requeue the groups of these quarantined batches, or of all if none is named.

        Raises: ValueError for a batch that is not quarantined.
        """
        requeued = self.quarantine.requeue(indices)
        if not requeued:
            return []
        line = requeued_line(requeued, by, self.batches.newest_version)
        note = Note(event="batches_requeued", fields={"batches": line["batches"], "by": by, "num_groups": len(requeued)})
        return [*(Save(row=each.group) for each in requeued), WriteMetrics(line=line), note]

    def fail_attempt(self, row: TrajectoryRow, reason: str, *, is_last: bool = False) -> list[Action]:
        """Handle an attempt that failed by itself, not with its lease: try once more, or give the trajectory up.
        ``is_last``: give it up in any case.
        """
        note = Note(
            event="attempt_failed",
            fields={
                "trajectory_id": row.trajectory_id,
                "peer": row.holder_peer,
                "attempts": row.attempts + 1,
                "reason": reason,
            },
            level="warning",
        )
        if not is_last and row.attempts + 1 < self.config.max_attempts:
            return [note, Save(row=self.groups.release(row.trajectory_id, failed=True))]
        if self.groups.group(row.group_id).split == "eval":
            return [note, *saves(self.groups.give_up(row.trajectory_id)), *self.close_evaluations()]
        # Its row may lag behind its chunks, and gets no further chunks.
        whole = Save(row=self.groups.release(row.trajectory_id, failed=True))
        actions = [note, whole, *self.drop_group(row.group_id, "failed")]
        failures = self.run.failures_in_a_row + 1
        actions += self.change_run(failures_in_a_row=failures)
        if failures >= self.config.failure_budget and not self.stop_reason:
            error = f"{failures} groups in a row failed (broker.failure_budget), the last one because of: {reason}"
            error = shortened(error)
            actions += [*self.change_run(error=error), *self.stop(error)]
        return actions

    def stop(self, reason: str) -> list[Action]:
        """Stop the run: no broker, not even the next one, assembles another batch or grants a lease."""
        if self.stop_reason:
            return []
        reason = shortened(reason)  # The learner hears it with EndOfRun.
        note = Note(event="run_stops", fields={"reason": reason}, level="warning")
        return [*self.change_run(stop_reason=reason), note]

    def stop_is_over(self) -> list[Action]:
        """Note that the stop was carried out: starting the run again continues it."""
        return self.change_run(stop_reason="", error="", failures_in_a_row=0, batches_without_signal=0)

    def change_run(self, **changes: Any) -> list[Action]:
        """Change the row of the whole run."""
        run = replace(self.run, **changes)
        if run == self.run:
            return []
        self.run = run
        return [Save(row=run)]

    def start_evaluations_that_are_due(self) -> list[Action]:
        newest = self.batches.newest
        if newest is None or self.stop_reason:
            return []
        actions: list[Action] = []
        for terms in self.evaluations.due(newest):
            row = self.evaluations.start(terms, newest)
            rows: list[Row] = [row]
            sampling = terms.sampling or self.config.schedules.sampling_at(row.batch)
            for index in range(row.num_tasks):
                sampling = replace(sampling, adapter=self.config.adapter_of(row.source, index))
                group = self.groups.start("eval", index, index, row.samples, row.evaluation_id, sampling=sampling)
                rows += [group, *self.groups.members(group.group_id)]
            fields = {"policy_version": row.policy_version, "batch": row.batch, "num_tasks": row.num_tasks, "set": row.name}
            actions += [*saves(rows), *self._tell_learner(row), Note(event="evaluation_started", fields=fields)]
        return actions

    def close_evaluations(self) -> list[Action]:
        """Close the open evaluations all of whose trajectories are done."""
        return [action for row in self.evaluations.open for action in self._close_if_done(row)]

    def _close_if_done(self, row: EvaluationRow) -> list[Action]:
        groups = [group for group in self.groups.of_split("eval") if group.evaluation == row.evaluation_id]
        if any(group.status == "open" for group in groups):
            return []
        tasks = {group.task_index: self.groups.members(group.group_id) for group in groups}
        done, lines = self.evaluations.close(row.evaluation_id, tasks)
        closed = [*saves(self.groups.close([group.group_id for group in groups], None)), Save(row=done)]
        return [*closed, *(WriteMetrics(line=line) for line in lines), *self._tell_learner(done), evaluation_note(done)]

    def _tell_learner(self, row: EvaluationRow) -> list[Action]:
        """Tell the learner, which then decides which checkpoint to keep. An absent one hears it after its Resume."""
        if not self.run.learner_session or not self.evaluations.decides(row):
            return []
        learner = SessionKey(self.run.learner_peer, self.run.learner_session)
        return [Reply(to=learner, message=Evaluated(scores=[score_of(row)]))]


def saves(rows: Sequence[Row]) -> list[Action]:
    return [Save(row=row) for row in rows]


def lease_ended(row: TrajectoryRow, reason: str) -> Reply:
    """Tell the holder of a leased trajectory that its lease has ended."""
    message = LeaseEnded(trajectory_id=row.trajectory_id, epoch=row.epoch, reason=shortened(reason))
    return Reply(to=SessionKey(row.holder_peer, row.holder_session), message=message)


def evaluation_note(row: EvaluationRow) -> Note:
    fields = {"policy_version": row.policy_version, "batch": row.batch, "reward": row.reward, "num_failed": row.num_failed}
    return Note(event="evaluation_done", fields={**fields, "set": row.name})
