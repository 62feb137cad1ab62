"""The state that leases and training share: decides when the run ends, and what a failed attempt leads to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from protocol.limits import trajectory_limits
from protocol.messages import Evaluated, LeaseEnded
from protocol.messages.base import shortened
from services.broker.ledger.actions import Action, Note, Reply, Save, SessionKey, WriteMetrics
from services.broker.ledger.admission import Admission, Window
from services.broker.ledger.batch_order import Batches
from services.broker.ledger.dead_letters import IN_A_ROW, DeadLetters, Failures, released_line
from services.broker.ledger.evaluations import Evaluations, score_of
from services.broker.ledger.group_states import Groups
from services.broker.ledger.lengths import length_stats, standard_error
from services.broker.ledger.task_order import TaskOrder
from services.broker.quotas import MIN_PATIENCE_S
from services.broker.rows import DropReason, EvaluationRow, LedgerContents, Row, TrajectoryRow


@dataclass(frozen=True, kw_only=True)
class LedgerConfig:
    """The run's rules, as far as the ledger needs them; see services.runtime.settings.sections for what each means."""

    run_id: str
    fingerprint: str
    seed: int
    num_batches: int
    group_size: int
    groups_per_batch: int
    max_lag: int
    max_tokens: int
    max_episode_tokens: int
    lease_s: float
    idle_lease_s: float
    max_attempts: int
    failure_budget: int
    evaluate_every_batches: int
    num_eval_tasks: int
    """Held-out tasks per evaluation: at most as many as there are."""
    num_train_tasks: int | None
    """None: endless."""
    min_patience_s: float = MIN_PATIENCE_S
    """A lease that brings nothing for less than this holds nobody up."""


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
            every_batches=config.evaluate_every_batches,
            num_batches=config.num_batches,
            num_tasks=config.num_eval_tasks,
        )
        self.failures = Failures(contents)
        self.dead_letters = DeadLetters(contents)
        self.order = TaskOrder(config.seed, config.num_train_tasks)
        self.next_prompt = contents.next_prompt
        self.num_batched_groups = contents.num_batched_groups
        self.num_dropped: dict[str, int] = dict(contents.num_dropped)
        self.run = contents.run

    @property
    def stop_reason(self) -> str:
        """Why no further batch is assembled, as soon as that is known; empty while there is no reason."""
        return self.run.stop_reason

    @property
    def oldest_allowed(self) -> int:
        """Oldest version whose tokens can go into the next batch."""
        return self.admission.oldest_allowed(self.batches.next_version)

    @property
    def num_wanted_groups(self) -> int:
        """How many more groups the rest of the run needs: none is admitted that no batch would take."""
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

    def window(self) -> Window:
        """The admission window for the version of the next batch."""
        newest = self.batches.newest_version
        oldest_versions = (group.oldest_version for group in self.groups.outstanding(newest))
        return Window(self.admission, oldest_versions, version=self.batches.next_version)

    # --- changes -----------------------------------------------------------------------------------------------------

    def start_group(self) -> tuple[int, list[Action]]:
        """Admit the next prompt, or one whose group was given back too late; returns the group's id and the actions."""
        for shelved in self.dead_letters.released:
            if shelved.oldest_version < self.oldest_allowed:
                former = self.dead_letters.resample(shelved.group.group_id)
                group = self.groups.start(
                    "train", former.prompt, former.task_index, self.config.group_size, None, replaces=former.group_id
                )
                return group.group_id, [Save(row=former), Save(row=group), *saves(self.groups.members(group.group_id))]
        prompt = self.next_prompt
        self.next_prompt += 1
        group = self.groups.start("train", prompt, self.order.task_index(prompt), self.config.group_size, None)
        return group.group_id, [Save(row=group), *saves(self.groups.members(group.group_id))]

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
        return [Save(row=row), *ended, WriteMetrics(line=line), note]

    def take_back(self, window: Window) -> list[Action]:
        """Put groups that an operator gave back among the complete ones: those that are fresh, if ``window`` has room."""
        actions: list[Action] = []
        for shelved in self.dead_letters.released:
            fresh = shelved.oldest_version >= self.oldest_allowed
            if self.num_wanted_groups <= 0 or not fresh or not window.add(shelved.oldest_version):
                continue
            back = self.dead_letters.take_back(shelved.group.group_id)
            self.groups.take_back(back.group, back.members)
            actions += [Save(row=back.group), Note(event="group_taken_back", fields={"group_id": back.group.group_id})]
        return actions

    def reshelve(self, contents: LedgerContents) -> None:
        """Batches that a checkpoint covered are delivered again, and may be set aside again."""
        self.failures = Failures(contents)
        self.dead_letters = DeadLetters(contents)

    def set_aside(self, index: int, reason: str) -> list[Action]:
        """No learner gets the batch any more. The run goes on without it, unless that happens to one batch after another."""
        row, shelved = self.dead_letters.set_aside(index, self.batches.newest_version, reason)
        self.num_batched_groups -= len(shelved)
        line = {
            "event": "set_aside",
            "batch": index,
            "reason": row.reason,
            "policy_version": row.policy_version,
            "groups": [each.group.group_id for each in shelved],
            "num_tokens": [member.num_tokens for each in shelved for member in each.members],
        }
        fields = {"batch": index, "reason": row.reason, "num_groups": len(shelved)}
        note = Note(event="batch_set_aside", fields=fields, level="warning")
        actions = [Save(row=row), *(Save(row=each.group) for each in shelved), WriteMetrics(line=line), note]
        if self.dead_letters.is_one_too_many(index) and not self.stop_reason:
            error = shortened(
                f"{IN_A_ROW} batches in a row were set aside, so the fault is not in the data; the last one, batch {index}, "
                f"because {row.reason}"
            )
            actions += [*self.change_run(error=error), *self.stop(error)]
        return actions

    def release(self, indices: Sequence[int], by: str) -> list[Action]:
        """Give the groups of these set-aside batches back, or of all if none is named.

        Raises: ValueError for a batch that is not set aside.
        """
        released = self.dead_letters.release(indices)
        if not released:
            return []
        line = released_line(released, by, self.batches.newest_version)
        note = Note(event="batches_released", fields={"batches": line["batches"], "by": by, "num_groups": len(released)})
        return [*(Save(row=each.group) for each in released), WriteMetrics(line=line), note]

    def fail_attempt(self, row: TrajectoryRow, reason: str) -> list[Action]:
        """An attempt at a leased trajectory failed by itself, not with its lease: try once more, or give it up."""
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
        if row.attempts + 1 < self.config.max_attempts:
            return [note, Save(row=self.groups.release(row.trajectory_id, failed=True))]
        if self.groups.group(row.group_id).split == "eval":
            return [note, *saves(self.groups.give_up(row.trajectory_id)), *self.close_evaluation()]
        self.groups.release(row.trajectory_id, failed=True)
        actions = [note, *self.drop_group(row.group_id, "failed")]
        failures = self.run.failures_in_a_row + 1
        actions += self.change_run(failures_in_a_row=failures)
        if failures >= self.config.failure_budget and not self.stop_reason:
            error = f"{failures} groups in a row failed (broker.failure_budget), the last one because of: {reason}"
            error = shortened(error)
            actions += [*self.change_run(error=error), *self.stop(error)]
        return actions

    def stop(self, reason: str) -> list[Action]:
        """No further batch is assembled and nothing more is leased, also not by the next broker."""
        if self.stop_reason:
            return []
        reason = shortened(reason)  # The learner hears it with EndOfRun.
        note = Note(event="run_stops", fields={"reason": reason}, level="warning")
        return [*self.change_run(stop_reason=reason), note]

    def stop_is_over(self) -> list[Action]:
        """The stop was carried out: starting the run again means continuing it."""
        return self.change_run(stop_reason="", error="", failures_in_a_row=0)

    def change_run(self, **changes: Any) -> list[Action]:
        """Change what is known about the run as a whole."""
        run = replace(self.run, **changes)
        if run == self.run:
            return []
        self.run = run
        return [Save(row=run)]

    def start_evaluation_if_due(self) -> list[Action]:
        newest = self.batches.newest
        if newest is None or self.stop_reason or not self.evaluations.is_due(newest):
            return []
        row = self.evaluations.start(newest)
        rows: list[Row] = [row]
        for index in range(row.num_tasks):
            group = self.groups.start("eval", index, index, 1, row.evaluation_id)
            rows += [group, *self.groups.members(group.group_id)]
        fields = {"policy_version": row.policy_version, "batch": row.batch, "num_tasks": row.num_tasks}
        return [*saves(rows), *self._tell_learner(row), Note(event="evaluation_started", fields=fields)]

    def close_evaluation(self) -> list[Action]:
        """Close the open evaluation if all its trajectories are done."""
        row = self.evaluations.open
        if row is None or any(group.status == "open" for group in self.groups.of_split("eval")):
            return []
        group_ids = [group.group_id for group in self.groups.of_split("eval")]
        members = [member for group_id in group_ids for member in self.groups.members(group_id)]
        done = self.evaluations.close(row.evaluation_id, members)
        line = {
            "event": "eval",
            "eval/reward": done.reward,
            "policy_version": done.policy_version,
            "batch": done.batch,
            "num_finished": done.num_finished,
            "num_failed": done.num_failed,
        }
        finished = [member for member in members if member.status == "finished"]
        if finished:
            line |= {"eval/reward_error": standard_error([member.reward for member in finished])}
            line |= length_stats(finished).line("eval/")
        closed = [*saves(self.groups.close(group_ids, None)), Save(row=done), WriteMetrics(line=line)]
        return [*closed, *self._tell_learner(done), evaluation_note(done)]

    def _tell_learner(self, row: EvaluationRow) -> list[Action]:
        """The learner decides by it which checkpoint to keep. One that is away hears it after its Resume."""
        if not self.run.learner_session:
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
    return Note(event="evaluation_done", fields=fields)
