"""Decides which rollout may extend which trajectory, and for how long."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from typing import Final, Literal

from gspo_protocol.limits import MAX_LEASES_PER_PEER
from gspo_protocol.messages import (
    Heartbeat,
    LeaseEnded,
    LeaseRequest,
    NoLease,
    Pulse,
    Refused,
)
from gspo_protocol.messages.base import shortened
from gspo_services.broker.ledger.actions import Action, GrantLease, Note, Offence, Reply, Save, SessionKey
from gspo_services.broker.ledger.admission import Window
from gspo_services.broker.ledger.fencing import LISTENING_S, Peer, Peers
from gspo_services.broker.ledger.fleet import Fleet
from gspo_services.broker.ledger.leases.deadlines import Deadlines
from gspo_services.broker.ledger.losses import MOST, is_suspect, is_unused, lost, verdict
from gspo_services.broker.ledger.sampling import trajectory_seed
from gspo_services.broker.ledger.state import State, lease_ended
from gspo_services.broker.quotas import Progress
from gspo_services.broker.rows import GroupRow, TrajectoryRow

NoLeaseReason = Literal["window_full", "version_too_old", "no_prompts", "stopping", "not_serving", "slowed"]
RETRY_SOON_S: Final = 0.25
RETRY_LATER_S: Final = 1.0
HEARD_SHARE: Final = 0.5
"""A rollout that was heard within this share of a lease's time lives."""


class Leases:
    """Holders and deadlines of leases. Deadlines are not durable: after a restart each lease gets a fresh one."""

    def __init__(
        self, state: State, now: float, peers: Peers, fleet: Fleet, discounts: Callable[[SessionKey], bool]
    ) -> None:
        """``discounts`` says whether a session's failed attempts count only against itself."""
        self._state = state
        self._peers = peers
        self._fleet = fleet
        self._discounts = discounts
        self._deadlines = Deadlines()
        """When a lease ends that is not renewed..."""
        self._idle_deadlines = Deadlines()
        """...and when one ends under which no new token is acknowledged."""
        self._progress = Progress(state.config.min_patience_s)
        self._last_tick = now
        for row in state.groups.leased():
            self._begin(row, now)

    # --- leases ---------------------------------------------------------------------------------------------------------

    def on_lease_request(
        self, sender: SessionKey, request: LeaseRequest, now: float, *, is_serving: bool = True
    ) -> list[Action]:
        """Grant up to ``capacity`` leases: a share of them to evaluations, the others to unfinished trajectories, then to
        new groups; what training has no use for goes to evaluations as well.

        ``is_serving``: the rollout reports that its engine serves a verified version.
        """
        state = self._state
        if state.stop_reason or state.finished:
            return [_no_lease(sender, request, "stopping")]
        if not is_serving:
            return [_no_lease(sender, request, "not_serving")]
        if request.policy_version > state.batches.newest_version:
            reason = f"policy_version is {request.policy_version}: {state.batches.newest_version} is the newest published"
            return [Reply(to=sender, message=Refused(reason=reason, message_type="lease_request"))]
        held = self._num_held(sender, request.capacity)
        if held + request.capacity > MAX_LEASES_PER_PEER:
            reason = (
                f"lease_request: capacity is {request.capacity}, {sender.peer} holds {held} leases already, "
                f"{MAX_LEASES_PER_PEER} allowed (MAX_LEASES_PER_PEER): use a smaller rollout.max_running"
            )
            return [Reply(to=sender, message=Refused(reason=reason, message_type="lease_request"))]
        actions: list[Action] = []
        window = state.window()
        left = request.capacity
        if (alone := self._alone(sender, request, window, now)) is not None:
            return alone
        waiting = state.groups.free_held_out()
        held_out = [row for row in waiting if self._may_grant(window, row, request.policy_version)]
        first = self._num_for_evaluation(len(held_out), request.capacity)
        for row in chain(held_out[:first], state.groups.free_for_training()):  # Evaluations come first.
            if not left:
                break
            if self._may_grant(window, row, request.policy_version):
                actions += self._grant(sender, row, request.policy_version, now)
                left -= 1
        actions += state.take_back(window)
        while left and self._may_admit(window, request.policy_version):
            group_id, started = state.start_group()
            actions += started
            for row in state.groups.members(group_id)[:left]:
                actions += self._grant(sender, row, request.policy_version, now)
                left -= 1
        for row in held_out[first : first + left]:
            actions += self._grant(sender, row, request.policy_version, now)
            left -= 1
        if left:
            reason = self._unfilled(request)
            if reason == "window_full":
                self._progress.has_room(sender.peer, now)
            actions.append(_no_lease(sender, request, reason))
        return actions

    def on_slowed(self, sender: SessionKey, request: LeaseRequest, retry_s: float) -> list[Action]:
        """Grant nothing before ``retry_s``, because of how the sender used earlier leases."""
        reason: NoLeaseReason = "slowed"
        return [Reply(to=sender, message=NoLease(request_id=request.request_id, reason=reason, retry_s=retry_s))]

    def _num_held(self, sender: SessionKey, wanted: int) -> int:
        """Leases that a session holds; 0, without counting, where all sessions together could have ``wanted`` more."""
        groups = self._state.groups
        if groups.num_leased + wanted <= MAX_LEASES_PER_PEER:
            return 0
        return sum(row.holder_session == sender.session for row in groups.held_by(sender.peer))

    def _num_for_evaluation(self, num_waiting: int, capacity: int) -> int:
        """How many of ``capacity`` leases go to evaluations before training has been asked: their share of all leases, so
        that they get on while training could use every lease, and never take the engines from it."""
        groups = self._state.groups
        if not num_waiting:
            return 0
        most = math.ceil(self._state.config.evaluation_share * (groups.num_leased + capacity))
        return min(num_waiting, capacity, max(0, most - groups.num_leased_held_out))

    def _alone(self, sender: SessionKey, request: LeaseRequest, window: Window, now: float) -> list[Action] | None:
        """What follows because the sender has a suspect, or has nothing and gets one; None: it is asked for other work."""
        groups = self._state.groups
        if not (suspects := groups.suspects()):
            return None
        no_more = _no_lease(sender, request, "window_full")
        if any(row.holder_peer == sender.peer and is_unused(row) for row in suspects):
            return [no_more]
        if groups.held_by(sender.peer):
            return None
        for row in suspects:
            if row.status == "free" and self._fits(window, row, request.policy_version):
                granted = self._grant(sender, row, request.policy_version, now)
                return [*granted, no_more] if request.capacity > 1 else granted
        return None

    def _may_grant(self, window: Window, row: TrajectoryRow, version: int) -> bool:
        return not is_suspect(row) and self._fits(window, row, version)

    def _fits(self, window: Window, row: TrajectoryRow, version: int) -> bool:
        state = self._state
        group = state.groups.group(row.group_id)
        if row.awaits_grade:
            return True
        if group.evaluation is not None:
            return version >= state.evaluations.row(group.evaluation).policy_version
        return window.extend(state.groups.oldest_possible_version(row.group_id, state.batches.newest_version), version)

    def _may_admit(self, window: Window, version: int) -> bool:
        state = self._state
        return state.num_wanted_groups > 0 and window.add(version)

    def _grant(self, sender: SessionKey, row: TrajectoryRow, version: int, now: float) -> list[Action]:
        state = self._state
        row = state.groups.grant(row.trajectory_id, sender, version)
        self._begin(row, now)
        group = state.groups.group(row.group_id)
        grant = GrantLease(
            to=sender,
            trajectory_id=row.trajectory_id,
            epoch=row.epoch,
            group_id=row.group_id,
            split=group.split,
            source=self._source(group),
            task_index=group.task_index,
            seed=trajectory_seed(state.config.seed, row.trajectory_id),
            sampling=group.sampling,
            num_tokens=0 if row.awaits_grade else row.num_tokens,
            num_entries=0 if row.awaits_grade else row.num_entries,
            members=tuple(state.groups.members(row.group_id)) if row.awaits_grade else (),
        )
        return [Save(row=row), grant]

    def _source(self, group: GroupRow) -> str:
        """Where the task of a group is."""
        return group.split if group.evaluation is None else self._state.evaluations.row(group.evaluation).source

    def _begin(self, row: TrajectoryRow, now: float) -> None:
        self._deadlines.set(row.trajectory_id, now + self._state.config.lease_s)
        self._idle_deadlines.set(row.trajectory_id, now + self._state.config.idle_lease_s)
        if row.awaits_grade:
            # No token is due, so none is late.
            self._progress.ended(row.trajectory_id)
        else:
            self._progress.began(row.trajectory_id, now)

    def _unfilled(self, request: LeaseRequest) -> NoLeaseReason:
        """Why there is no lease for all of ``request``'s capacity."""
        state = self._state
        newest = state.batches.newest_version
        if newest == 0 or request.policy_version < min(state.oldest_allowed, newest):
            return "version_too_old"
        return "no_prompts" if state.num_wanted_groups <= 0 else "window_full"

    def undelivered(self, trajectory_id: int, epoch: int, reason: str) -> list[Action]:
        """Free a lease that could not be sent, so has no holder. With a ``reason`` it is a failed attempt."""
        row = self._state.groups.trajectory(trajectory_id)
        if row is None or row.status != "leased" or row.epoch != epoch:
            return []
        if reason:
            return self._state.fail_attempt(row, reason)
        return [Save(row=self._state.groups.release(trajectory_id, failed=False))]

    def session_started(self, sender: SessionKey, now: float) -> list[Action]:
        """End the leases of the peer's former lives: no process is left that could extend them."""
        ended = [row for row in self._state.groups.held_by(sender.peer) if row.holder_session != sender.session]
        actions = self._end_leases(ended, now)
        if any(map(is_unused, ended)):
            actions.append(Offence(by=sender, reason="expired"))
        return actions

    def session_ended(self, sender: SessionKey, now: float) -> list[Action]:
        """End all leases of a sender that said Goodbye or is shut out: what it has not handed back resumes elsewhere."""
        held = self._state.groups.held_by(sender.peer)
        return self._end_leases((row for row in held if row.holder_session == sender.session), now)

    def _end_leases(self, rows: Iterable[TrajectoryRow], now: float) -> list[Action]:
        actions: list[Action] = []
        for row in rows:
            fields = {"trajectory_id": row.trajectory_id, "peer": row.holder_peer, "num_tokens": row.num_tokens}
            actions += [Note(event="lease_of_former_session_ended", fields=fields), *self._lose(row, now)]
        return actions

    def _lose(self, row: TrajectoryRow, now: float) -> list[Action]:
        """End a lease that was not handed back. If its holder neither lives nor was leaving, the trajectory may have ended
        it."""
        if self._state.groups.trajectory(row.trajectory_id) is None:
            return []  # The loss of one before it has dropped its group.
        holder = self._peers.get(SessionKey(row.holder_peer, row.holder_session))
        if self._is_heard(holder, now) or self._fleet.state(row.holder_peer) == "draining":
            return [Save(row=self._state.groups.release(row.trajectory_id, failed=False))]
        after = lost(row)
        if len(after.lost_by) == MOST and (reason := verdict(after, others_serve=self._others_serve(row.holder_peer, now))):
            return self._state.fail_attempt(row, reason, is_last=True)
        return [Save(row=self._state.groups.lose(row.trajectory_id))]

    def _is_heard(self, peer: Peer | None, now: float) -> bool:
        """Whether a session lives: it reports several times within a lease's time."""
        return peer is not None and now - peer.last_seen <= self._state.config.lease_s * HEARD_SHARE

    def _others_serve(self, name: str, now: float) -> bool:
        return any(
            peer.key.peer != name and self._fleet.state(peer.key.peer) == "serving" and self._is_heard(peer, now)
            for peer in self._peers.of_role("rollout")
        )

    def on_heartbeat(self, sender: SessionKey, heartbeat: Heartbeat, now: float) -> list[Action]:
        """Renew exactly the leases that ``heartbeat`` names; tell the sender which of them it no longer holds."""
        state = self._state
        actions: list[Action] = []
        end = now + state.config.lease_s
        for key, is_held in zip(heartbeat.leases, state.groups.are_held(sender, heartbeat.leases), strict=True):
            if is_held:
                self._deadlines.set(key.trajectory_id, end)
            else:
                actions.append(told_ended(sender, key.trajectory_id, key.epoch, "not held by this session"))
        return [*actions, self.pulse(sender)]

    def pulse(self, to: SessionKey) -> Reply:
        """The answer to a heartbeat: the newest version, and that the broker is there."""
        state = self._state
        newest = state.batches.newest
        message = Pulse(
            policy_version=state.batches.newest_version,
            weights_endpoint=newest.endpoint if newest is not None else "",
            stopping=bool(state.stop_reason) or state.finished,
        )
        return Reply(to=to, message=message)

    def expire(self, now: float, *, learner_waits: bool = False) -> list[Action]:
        """End leases that were not renewed, or that brought no token for long: their trajectories resume elsewhere.

        Time in which the broker was not listening does not count: heartbeats sent in it are still to be read.
        ``learner_waits``: for a batch, so that a late lease delays the whole run.
        """
        deaf_s = now - self._last_tick
        self._last_tick = now
        if deaf_s > LISTENING_S:
            self._progress.pause(deaf_s)
            for deadlines in (self._deadlines, self._idle_deadlines):
                deadlines.postpone(deaf_s)
        unused: dict[SessionKey, None] = {}
        actions: list[Action] = []
        for row in self._leased(self._deadlines.past(now)):
            fields = {
                "trajectory_id": row.trajectory_id,
                "epoch": row.epoch,
                "peer": row.holder_peer,
                "num_tokens": row.num_tokens,
            }
            actions.append(Note(event="lease_expired", fields=fields, level="warning"))
            actions += self._take_back(row, "it was not renewed in time", unused, now)
        if learner_waits:
            actions += self._take_back_late(now, unused)
        # One for each holder: a rollout that dies with a thousand leases has failed once.
        offences = [Offence(by=holder, reason="expired") for holder in unused]
        return [*actions, *offences, *self._end_idle(now)]

    def _leased(self, trajectory_ids: Iterable[int]) -> Iterator[TrajectoryRow]:
        """Yield the trajectories that are still leased, one by one, since handling one may end others. Forget the rest."""
        for trajectory_id in list(trajectory_ids):
            row = self._state.groups.trajectory(trajectory_id)
            if row is not None and row.status == "leased":
                yield row
            else:
                self._forget(trajectory_id)

    def _forget(self, trajectory_id: int) -> None:
        self._deadlines.remove(trajectory_id)
        self._idle_deadlines.remove(trajectory_id)
        row = self._state.groups.trajectory(trajectory_id)
        self._progress.ended(trajectory_id, done=row is None or row.status == "finished")

    def _take_back(self, row: TrajectoryRow, reason: str, unused: dict[SessionKey, None], now: float) -> list[Action]:
        """End a lease, and note in ``unused`` who held it without tokens."""
        self._forget(row.trajectory_id)
        if is_unused(row):
            unused[SessionKey(row.holder_peer, row.holder_session)] = None
        return [lease_ended(row, reason), *self._lose(row, now)]

    def _take_back_late(self, now: float, unused: dict[SessionKey, None]) -> list[Action]:
        """End leases without progress for unusually long, while the learner waits and another rollout has room."""
        late = self._progress.late(now)
        actions: list[Action] = []
        for row in self._leased(late):
            if self._progress.others_have_room(row.holder_peer):
                silent_s = late[row.trajectory_id]
                fields = {"trajectory_id": row.trajectory_id, "peer": row.holder_peer, "silent_s": round(silent_s, 1)}
                actions.append(Note(event="lease_taken_back", fields=fields, level="warning"))
                reason = f"no new token in {silent_s:.1f} s, far longer than usual, and the learner waits"
                actions += self._take_back(row, reason, unused, now)
                self._progress.took_back(row.trajectory_id)
        return actions

    def _end_idle(self, now: float) -> list[Action]:
        """End leases that are renewed without tokens: they would block their groups, and so the batch, for ever.

        One per holder at a time, so that each offence is counted before the next one is judged.
        """
        actions: list[Action] = []
        holders: set[SessionKey] = set()
        for row in self._leased(self._idle_deadlines.past(now)):
            holder = SessionKey(row.holder_peer, row.holder_session)
            if holder in holders:
                continue
            holders.add(holder)
            self._forget(row.trajectory_id)
            reason = f"no new token in {self._state.config.idle_lease_s:g} s (broker.idle_lease_s)"
            ended = lease_ended(row, reason)
            offence = Offence(by=holder, reason="idle")
            actions += [ended, offence, *self.failed(holder, row, f"trajectory {row.trajectory_id}: {reason}")]
        return actions

    def end_leases_older_than(self, version: int, group_id: int) -> list[Action]:
        """After versions jumped, take back leases under which engines may still generate with versions that are too old."""
        actions: list[Action] = []
        for row in self._state.groups.members(group_id):
            if row.status == "leased" and row.lease_version < version:
                reason = f"granted at version {row.lease_version}, {version} is the oldest allowed"
                freed = self._state.groups.release(row.trajectory_id, failed=False)
                actions += [lease_ended(row, reason), Save(row=freed)]
        return actions

    # --- for what comes in under leases ---------------------------------------------------------------------------------

    def held(self, sender: SessionKey, trajectory_id: int, epoch: int) -> TrajectoryRow | None:
        """The trajectory if this session holds it in this epoch."""
        row = self._state.groups.trajectory(trajectory_id)
        if row is None or row.status != "leased" or row.epoch != epoch:
            return None
        return row if sender == (row.holder_peer, row.holder_session) else None

    def failed(self, sender: SessionKey, row: TrajectoryRow, reason: str) -> list[Action]:
        """Count a failed attempt, unless only this peer fails: it must not use up the trajectory's attempts."""
        if not self._discounts(sender):
            return self._state.fail_attempt(row, reason)
        fields = {"trajectory_id": row.trajectory_id, "peer": sender.peer, "reason": reason}
        note = Note(event="attempt_not_counted", fields=fields, level="warning")
        return [note, Save(row=self._state.groups.release(row.trajectory_id, failed=False))]

    def moved(self, trajectory_ids: Collection[int], now: float, *, ends: bool = False) -> None:
        """Note progress under these leases, so that they are not idle."""
        if not ends:
            self._idle_deadlines.set_all(trajectory_ids, now + self._state.config.idle_lease_s)
        self._progress.moved(trajectory_ids, now)


def told_ended(sender: SessionKey, trajectory_id: int, epoch: int, reason: str) -> Reply:
    return Reply(to=sender, message=LeaseEnded(trajectory_id=trajectory_id, epoch=epoch, reason=shortened(reason)))


def _no_lease(sender: SessionKey, request: LeaseRequest, reason: NoLeaseReason) -> Reply:
    retry_s = RETRY_SOON_S if reason in ("window_full", "version_too_old", "not_serving") else RETRY_LATER_S
    return Reply(to=sender, message=NoLease(request_id=request.request_id, reason=reason, retry_s=retry_s))
