"""Decides when the learner gets the next batch or the end of the run, and takes its publications and checkpoints."""

from typing import Any, Final

import msgspec

from gspo_protocol.messages import (
    BatchFailed,
    BatchPartRequest,
    BatchPending,
    BatchRequest,
    Checkpointed,
    EndOfRun,
    Evaluated,
    Published,
    Pulse,
    Refused,
    Resume,
    SkipBatch,
    Trained,
)
from gspo_protocol.messages.base import shortened
from gspo_services.broker.ledger.actions import (
    Action,
    Announce,
    DeliverBatch,
    DeliverParts,
    Note,
    Offence,
    Reply,
    Reshelve,
    Save,
    SessionKey,
    WriteMetrics,
)
from gspo_services.broker.ledger.admission import Choice
from gspo_services.broker.ledger.intake import check_published_experts
from gspo_services.broker.ledger.learning import count_signal, data_measures
from gspo_services.broker.ledger.leases import Leases
from gspo_services.broker.ledger.lengths import batch_report, pass_rates
from gspo_services.broker.ledger.state import State, saves

PENDING_INTERVAL_S: Final = 1.0
NAMED_GROUPS: Final = 4
"""At most this many groups are named in the text that says what a batch waits for."""


class Training:
    """Publications and trainings. At most one request for a batch waits: the learner's latest."""

    def __init__(self, state: State, leases: Leases, now: float) -> None:
        self._state = state
        self._leases = leases
        self._waiting: tuple[SessionKey, BatchRequest] | None = None
        self._last_pending = now - PENDING_INTERVAL_S
        self._last_trained_at: float | None = None
        self._quiet_since = now
        self._session_has_checkpointed = False
        self.tokens_per_s: float | None = None
        """Tokens of the last trained batch over the time since the one before."""

    def learner_lost(self) -> list[Action]:
        """Handle a learner that was replaced: it died without a report, perhaps because of its batch."""
        state = self._state
        index = state.run.learner_batch
        if index is None or index < state.batches.checkpointed:
            return []
        rows = state.failures.ended_silently(index)
        note = Note(event="learner_ended_silently", fields={"batch": index}, level="warning")
        return [*saves(rows), note, *self._judge(index)]

    @property
    def waits(self) -> bool:
        """Whether the learner has asked for a batch that does not exist yet."""
        return self._waiting is not None

    def session_ended(self) -> None:
        """Drop the request for a batch of a learner that left or was replaced."""
        self._waiting = None
        self._last_trained_at = None
        self._session_has_checkpointed = False

    # --- events -------------------------------------------------------------------------------------------------------

    def on_published(self, sender: SessionKey, published: Published) -> list[Action]:
        state = self._state
        try:
            check_published_experts(published, state.run.experts)
            rows = state.batches.publish(published)
        except ValueError as error:
            return [_refuse(sender, f"published: {error}", "published")]
        told = [] if published.experts is None else state.change_run(experts=published.experts)
        if not rows:
            return told
        fields = {"policy_version": published.policy_version, "trained_batches": published.trained_batches}
        pulse = Pulse(
            policy_version=published.policy_version, weights_endpoint=published.endpoint, stopping=bool(state.stop_reason)
        )
        return [
            *saves(rows),
            *told,
            *self._survived(published.trained_batches),
            Note(event="version_published", fields=fields),
            Announce(message=pulse),
            *self._sweep(),
        ]

    def on_trained(self, sender: SessionKey, trained: Trained, now: float) -> list[Action]:
        state = self._state
        why = state.quarantine.reason(trained.index)
        if trained.skipped != bool(why):
            text = f"was quarantined ({why}), and must be skipped" if why else "was not quarantined: train it"
            return [_refuse(sender, f"trained: batch {trained.index} {text}", "trained")]
        again = state.batches.was_trained(trained.index)
        try:
            rows = state.batches.train(trained)
        except ValueError as error:
            return [_refuse(sender, f"trained: {error}", "trained")]
        line: dict[str, Any]
        if trained.skipped:
            if not rows:
                return []
            line = {"event": "batch_skipped", "batch": trained.index, "policy_version": trained.policy_version}
            return [*saves(rows), WriteMetrics(line=line), Note(event="batch_skipped", fields={"batch": trained.index})]
        batch = state.batches.batch(trained.index)
        report = {} if batch is None else batch_report(batch)
        self.tokens_per_s = None
        if batch is not None and self._last_trained_at is not None and now > self._last_trained_at:
            num_tokens = report["num_tokens"] or batch.stats.num_tokens
            self.tokens_per_s = num_tokens / (now - self._last_trained_at)
        self._last_trained_at = self._quiet_since = now
        if not rows:
            return [Note(event="batch_trained", fields={"batch": trained.index, "again": True})]
        line = {"event": "batch", **trained.metrics, "batch": trained.index}
        line |= {"policy_version": trained.policy_version, "again": again, "tokens_per_s": self.tokens_per_s}
        if batch is not None:
            line |= {
                "assembled_at_version": batch.policy_version,
                "num_resting_tasks": state.rests.num_resting(trained.index),
                **{f"level/{name}": level for name, level in state.curriculum.levels().items()},
                **report,
                **data_measures(state),
            }
        fields = {"batch": trained.index, "reward": line.get("train/reward"), "lag": line.get("lag/mean"), "again": again}
        note = Note(event="batch_trained", fields=fields)
        trained_rows = [*saves(rows), *saves(state.failures.trained(trained.index)), WriteMetrics(line=line), note]
        return trained_rows if again else [*trained_rows, *count_signal(state, line)]

    def on_failed(self, sender: SessionKey, failed: BatchFailed) -> list[Action]:
        """Handle the report of a learner that ends because it could not train a batch."""
        state = self._state
        index = failed.index
        if index >= state.batches.num_assembled:
            reason = f"batch_failed: index is {index}: only {state.batches.num_assembled} batches exist"
            return [_refuse(sender, reason, "batch_failed")]
        actions = state.change_run(learner_batch=None)
        if index < state.batches.checkpointed or state.quarantine.reason(index):
            return actions  # It was trained before, or is skipped already.
        if failed.raised:
            rows = state.failures.report(index, sender.tag, failed.reason)
        else:
            rows = state.failures.ended_silently(index)
        fields = {"batch": index, "reason": failed.reason, "raised": failed.raised}
        note = Note(event="batch_failed", fields=fields, level="warning")
        return [*actions, *saves(rows), note, *self._judge(index)]

    def on_unreadable(self, sender: SessionKey, index: int, reason: str) -> list[Action]:
        """A batch cannot be read, or does not fit a message: nobody will ever train it."""
        if self._state.quarantine.reason(index):
            return []
        return [*self._state.quarantine_batch(index, f"it cannot be delivered: {reason}"), *self._deliver(sender, index)]

    def on_checkpointed(self, sender: SessionKey, checkpointed: Checkpointed) -> list[Action]:
        try:
            rows = self._state.batches.checkpoint(checkpointed)
        except ValueError as error:
            return [_refuse(sender, f"checkpointed: {error}", "checkpointed")]
        self._state.failures.forget_below(self._state.batches.checkpointed)
        self._state.quarantine.forget_below(self._state.batches.checkpointed)
        self._session_has_checkpointed = True
        return [*saves(rows), *(Note(event="batches_checkpointed", fields=msgspec.to_builtins(row)) for row in rows)]

    def on_resume(self, sender: SessionKey, resume: Resume) -> list[Action]:
        """Handle a learner that resumes, from an older checkpoint if its newest was damaged."""
        if resume.next_batch < self._state.batches.checkpointed and self._session_has_checkpointed:
            return []  # It was overtaken by the checkpoint that followed it.
        try:
            rows = self._state.batches.resume(resume.next_batch)
        except ValueError as error:
            return [_refuse(sender, str(error), "resume")]
        fields = {"next_batch": resume.next_batch, "trained_again": self._state.batches.num_trained - resume.next_batch}
        again: list[Action] = [Reshelve()] if rows else []
        if scores := self._state.evaluations.scores():
            again.append(Reply(to=sender, message=Evaluated(scores=scores)))
        return [*saves(rows), *again, Note(event="learner_resumed", fields=fields, level="warning" if rows else "info")]

    def on_batch_request(self, sender: SessionKey, request: BatchRequest) -> list[Action]:
        """Deliver an assembled batch at once; a request for the next one waits (see ``advance``)."""
        batches = self._state.batches
        if request.index > batches.num_assembled or request.index < batches.checkpointed:
            reason = (
                f"batch_request: index is {request.index}: a checkpoint covers those below {batches.checkpointed}, "
                f"{batches.num_assembled} is the next new one"
            )
            return [_refuse(sender, reason, "batch_request")]
        survived = self._survived(request.index)
        if request.index < batches.num_assembled:
            self._waiting = None
            return [*survived, *self._deliver(sender, request.index)]
        self._waiting = (sender, request)
        return survived

    def on_part_request(self, sender: SessionKey, request: BatchPartRequest) -> list[Action]:
        """Send parts of a batch that was announced to the learner, maybe by an earlier life of this broker."""
        batches = self._state.batches
        if not batches.checkpointed <= request.index < batches.num_assembled:
            reason = (
                f"batch_part_request: index is {request.index}: a checkpoint covers the batches below "
                f"{batches.checkpointed}, {batches.num_assembled} is the next new one"
            )
            return [_refuse(sender, reason, "batch_part_request")]
        if self._state.quarantine.reason(request.index):
            return self._deliver(sender, request.index)
        return [DeliverParts(to=sender, index=request.index, part=request.part, count=request.count)]

    # --- after every event -------------------------------------------------------------------------------------------

    def advance(self, now: float) -> list[Action]:
        """Answer the waiting request if possible: with a new batch, the end of the run, or the reason to wait."""
        if self._waiting is None:
            return []
        sender, request = self._waiting
        state = self._state
        if state.end_reason:
            self._waiting = None
            return [Reply(to=sender, message=EndOfRun(index=request.index, reason=state.end_reason))]
        actions = self._sweep() if not self._blocked(request) else []
        choice = self._choose() if not self._blocked(request) else Choice(group_ids=())
        if choice.group_ids:
            self._waiting = None
            return [*actions, *self._assemble(choice.group_ids), *self._deliver(sender, request.index)]
        if now - self._last_pending >= PENDING_INTERVAL_S:
            self._last_pending = now
            pending = BatchPending(
                index=request.index,
                groups_ready=state.groups.num_complete,
                groups_needed=state.config.groups_per_batch,
                waiting_for=shortened(self.waiting_for()),
            )
            actions.append(Reply(to=sender, message=pending))
        return actions

    def quiet_s(self, now: float) -> float:
        """Seconds since a batch was trained, or since this broker started."""
        return now - self._quiet_since

    def waiting_for(self) -> str:
        """What the next batch waits for, in words, so that no wait is silent."""
        state = self._state
        if state.end_reason:
            return ""
        if self._waiting is not None:
            blocked = self._blocked(self._waiting[1])
            if blocked:
                return blocked
        if state.batches.newest is None:
            return "the learner to publish its first weights"
        choice = self._choose()
        if choice.group_ids:
            return "the learner to ask for the next batch"
        if choice.due:
            named = [self._describe(group_id) for group_id in choice.due[:NAMED_GROUPS]]
            return f"{len(choice.due)} groups that must not get older: " + ", ".join(named)
        groups = state.groups
        return (
            f"{state.config.groups_per_batch - choice.num_complete} more complete groups: {choice.num_complete} of "
            f"{state.config.groups_per_batch} are ready, {groups.num_leased} trajectories under way, {groups.num_free} free"
        )

    def _blocked(self, request: BatchRequest) -> str:
        """Why no batch can be assembled, whatever the groups; empty if one can."""
        state = self._state
        batches = state.batches
        if request.index >= state.config.num_batches:
            evaluating = state.evaluations.open
            if not evaluating:
                return "the weights after the last batch to be published, for the final evaluation"
            done = sum(1 for group in state.groups.of_split("eval") if group.status == "complete")
            names = f" on {', '.join(row.name for row in evaluating)}" if evaluating[0].name else ""
            total = sum(row.num_tasks for row in evaluating)
            return f"evaluation of version {evaluating[0].policy_version}{names}: {done} of {total} tasks done"
        if batches.is_next_to_be_published(request.policy_version):
            return ""
        if batches.newest_version != request.policy_version:
            return f"version {request.policy_version} to be published, {batches.newest_version} is the newest"
        if batches.num_trained != batches.num_assembled:
            return (
                f"weights trained on {batches.num_assembled} batches to be published, version {batches.newest_version} was "
                f"trained on {batches.num_trained}"
            )
        return ""

    def _deliver(self, sender: SessionKey, index: int) -> list[Action]:
        """Send a batch, or that it is to be skipped. Which batch the learner has is durable before it gets it."""
        reason = self._state.quarantine.reason(index)
        if reason:
            skip = Reply(to=sender, message=SkipBatch(index=index, reason=reason))
            return [*self._state.change_run(learner_batch=None), skip]
        return [*self._state.change_run(learner_batch=index), DeliverBatch(to=sender, index=index)]

    def _survived(self, next_batch: int) -> list[Action]:
        """Note that the learner has trained the batches below ``next_batch``."""
        index = self._state.run.learner_batch
        if index is None or index >= next_batch:
            return []
        return [*self._state.change_run(learner_batch=None), *saves(self._state.failures.trained(index))]

    def _judge(self, index: int) -> list[Action]:
        verdict = self._state.failures.verdict(index)
        return self._state.quarantine_batch(index, verdict) if verdict else []

    def _choose(self) -> Choice:
        state = self._state
        if state.groups.num_complete < state.config.groups_per_batch:
            return Choice(group_ids=(), num_complete=state.groups.num_complete)  # Whatever the others are.
        groups = state.groups.outstanding(state.batches.newest_version)
        return state.admission.choose_batch(groups, version=state.batches.next_version)

    def _assemble(self, group_ids: tuple[int, ...]) -> list[Action]:
        state = self._state
        version = state.batches.next_version
        members = [state.groups.members(group_id) for group_id in group_ids]
        assert all(state.admission.allows(row.min_version, version) for group in members for row in group)
        samplings = [state.groups.group(group_id).sampling for group_id in group_ids]
        values = state.config.schedules.training_at(state.batches.num_assembled)
        rates = pass_rates(
            [(state.groups.group(group_id), state.groups.members(group_id)) for group_id in group_ids], state.task_passes
        )
        batch = state.batches.assemble(
            version,
            members,
            samplings,
            values,
            rates,
            state.run.filtered_groups,
            state.run.filtered_tokens,
            by_turn=state.config.sampling.by_turn,
        )
        rows = state.groups.close(group_ids, batch.index)
        state.note_passes(rows, members)
        for row, trajectories in zip(rows, members, strict=True):
            state.quarantine.keep(row, trajectories)
        state.num_batched_groups += len(rows)
        fields = {"batch": batch.index, "policy_version": version, **msgspec.to_builtins(batch.stats)}
        note = Note(event="batch_assembled", fields=fields)
        counted = state.change_run(filtered_groups=0, filtered_tokens=0)
        return [Save(row=batch), *saves(rows), *counted, note, *self._sweep()]

    def _sweep(self) -> list[Action]:
        """Drop groups that are too old for any batch to come, and take back leases whose tokens would be.

        Does nothing while admission's theorem holds; a version is left out when a learner restarts and makes other weights.
        """
        state = self._state
        oldest = state.oldest_allowed
        actions: list[Action] = []
        if not state.groups.has_older_than(oldest):
            return actions
        for group in list(state.groups.of_split("train")):
            oldest_version = state.groups.oldest_version(group.group_id)
            if not oldest_version or oldest_version >= oldest:
                continue
            if any(0 < row.min_version < oldest for row in state.groups.members(group.group_id)):
                holders = {
                    SessionKey(row.holder_peer, row.holder_session): None
                    for row in state.groups.members(group.group_id)
                    if row.status == "leased"
                }
                actions += [Offence(by=holder, reason="stale") for holder in holders]
                actions += state.drop_group(group.group_id, "stale")
            else:
                actions += self._leases.end_leases_older_than(oldest, group.group_id)
        return actions

    def _describe(self, group_id: int) -> str:
        members = self._state.groups.members(group_id)
        done = sum(1 for row in members if row.status == "finished")
        holders = sorted({row.holder_peer for row in members if row.status == "leased"})
        free = sum(1 for row in members if row.status == "free")
        where = f"under way at {', '.join(holders[:NAMED_GROUPS])}" if holders else "under way nowhere"
        return f"group {group_id} ({done} of {len(members)} finished, {free} free, {where})"


def _refuse(sender: SessionKey, reason: str, message_type: str) -> Reply:
    """Refuse fatally: a learner that contradicts the ledger cannot fix that by continuing."""
    return Reply(to=sender, message=Refused(reason=shortened(reason), message_type=message_type, fatal=True))
