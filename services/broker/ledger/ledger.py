"""Decides what follows from each event: events in, actions out. No sockets, clocks, disks or logs; it knows ids, offsets,
lengths, versions and epochs (fencing numbers), never tokens.

Each event is handled as a whole and returns the actions in order. The shell makes the rows (``Save``, ``AppendChunk``)
durable first and carries out the rest afterwards, acknowledgements included: the ledger may therefore answer as if
everything it decided were on disk already.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec.structs import replace

from gspo_protocol.codec import message_type
from gspo_protocol.limits import PROTOCOL_VERSION
from gspo_protocol.messages import (
    SEQUENCED,
    Ack,
    AnyMessage,
    BatchFailed,
    BatchPartRequest,
    BatchRequest,
    Checkpointed,
    Chunk,
    Finish,
    Goodbye,
    Graded,
    Heartbeat,
    Hello,
    Journal,
    LeaseRequest,
    Message,
    Published,
    Refused,
    Release,
    RequeueRequest,
    Resume,
    Role,
    Status,
    StatusRequest,
    StopRequest,
    Trained,
    Welcome,
)
from gspo_protocol.messages.gathered import Chunks, Gathered
from gspo_protocol.releases import other_release
from gspo_services.broker.ledger.actions import Action, Note, Offence, Reply, Save, SessionKey, refused, shut_out
from gspo_services.broker.ledger.config import LedgerConfig
from gspo_services.broker.ledger.fencing import NOBODY, Owner, Peer, Peers, PlaceTaken, SessionRefused, subjects_of
from gspo_services.broker.ledger.fleet import Fleet
from gspo_services.broker.ledger.intake import TokenFacts
from gspo_services.broker.ledger.leases import HolderMessages, Leases
from gspo_services.broker.ledger.sampling import AddedTasks
from gspo_services.broker.ledger.state import State
from gspo_services.broker.ledger.status import status_of
from gspo_services.broker.ledger.training import Training
from gspo_services.broker.quotas import (
    PLACES,
    QUOTAS,
    RETRY_S,
    SLOWED_LEASES,
    SLOWED_RETRY_S,
    STATUS_WEIGHT,
    Change,
    NoPlace,
    OffenceReason,
    Places,
    Quota,
    Quotas,
    Subject,
)
from gspo_services.broker.rows import LedgerContents

UNKNOWN_SESSION: Final = "unknown session: say hello"
FORGIVE_EVERY_S: Final = 1.0
ATTEMPTS_SHARE: Final = 4
"""One rollout may use up this share of the failed attempts that end a run; further ones say nothing about the run."""
ALLOWED: Final[dict[Role, tuple[type[Message], ...]]] = {
    "rollout": (LeaseRequest, Chunk, Chunks, Journal, Finish, Graded, Release, Heartbeat, Goodbye),
    "learner": (
        BatchRequest, BatchPartRequest, Published, Trained, BatchFailed, Checkpointed, Resume, StopRequest, Heartbeat,
        Goodbye,
    ),
    "operator": (StatusRequest, StopRequest, RequeueRequest, Goodbye),
}  # fmt: skip


class Ledger:
    """The whole state machine."""

    def __init__(
        self,
        config: LedgerConfig,
        contents: LedgerContents,
        now: float,
        *,
        places: Mapping[Role, Places] = PLACES,
        quotas: Mapping[OffenceReason, Quota] = QUOTAS,
    ) -> None:
        self.state = State(config, contents)
        run = contents.run
        self.fleet = Fleet()
        learner = SessionKey(run.learner_peer, run.learner_session) if run.learner_session else None
        self.peers = Peers(now, learner, places)
        self.quotas = Quotas(quotas)
        self._forgiven_at = now
        self.leases = Leases(self.state, now, self.peers, self.fleet, self._discounts)
        self.holders = HolderMessages(self.state, self.leases)
        self.training = Training(self.state, self.leases, now)

    def on_hello(self, hello: Hello, now: float, owner: Owner = NOBODY) -> list[Action]:
        """Handle the first message of a session or connection. The answer is Welcome, or Refused (fatal or retryable); a
        peer that says Hello far too often gets none.

        ``owner``: the sender's proven identity.
        """
        self.peers.listen(now)
        sender = SessionKey(hello.peer, hello.session)
        if hello.protocol_version != PROTOCOL_VERSION:
            return [Reply(to=sender, message=other_release(hello, "broker"))]
        if hello.fingerprint and hello.fingerprint != self.state.config.fingerprint:
            # Before it has a session: another run's process must not take the place of one of this run's.
            reason = (
                f"hello: this broker's run has other settings (fingerprint {self.state.config.fingerprint}, sent was "
                f"{hello.fingerprint}): run.seed, the model directory's name, [environment], reward.on_deadline, "
                "reward.group, reward.model with what it reads, counts and computes in, [agent] and [batch] must be the "
                "same everywhere; or is this another run's broker on this port?"
            )
            return [refused(sender, reason, "hello", fatal=True)]
        is_new = self.peers.get(sender) is None
        who = subjects_of(hello.role, sender.peer, owner)
        said = self._held_against(who, "messages", now)
        if self.quotas.ignores(who, now):
            return [*said, Offence(by=sender, reason="messages")]
        wait_s = self.quotas.shut_out_s(who, now)
        if wait_s > 0:
            return [*said, shut_out(sender, wait_s)]
        try:
            silent = self.peers.make_room(sender, hello.role, now, owner)
            replaced = self.peers.hello(sender, hello.role, hello.first_seq, now, owner)
        except SessionRefused as error:
            return [refused(sender, f"hello: {error}", "hello", fatal=True)]
        except PlaceTaken as error:
            return [refused(sender, f"hello: {error}", "hello")]
        except NoPlace as error:
            return [refused(sender, f"hello: {error}", "hello", retry_s=RETRY_S)]
        actions: list[Action] = [*said, *(self._forgotten(silent, "its place was needed") if silent is not None else ())]
        actions += [
            Note(
                event="session_replaced",
                fields={"peer": other.peer, "session": other.tag, "by": sender.peer},
            )
            for other in replaced
        ]
        if hello.role == "rollout":
            ended = self.leases.session_started(sender, now)
            actions += [*(self.fleet.begins(sender.peer) if is_new else ()), *self._judged(ended, now)]
        elif hello.role == "learner":
            if replaced:
                actions += [*self.training.learner_lost(), *self.state.change_run(learner_batch=None)]
                self.training.session_ended()
            actions += self.state.change_run(learner_peer=sender.peer, learner_session=sender.session)
        actions.append(Note(event="hello", fields={"peer": sender.peer, "session": sender.tag, "role": hello.role}))
        newest = self.state.batches.newest
        welcome = Welcome(
            protocol_version=PROTOCOL_VERSION,
            run_id=self.state.config.run_id,
            policy_version=self.state.batches.newest_version,
            trained_batches=self.state.batches.num_trained,
            weights_digest=newest.digest if newest is not None else "",
            weights_endpoint=newest.endpoint if newest is not None else "",
            next_batch=self.state.batches.checkpointed,
            fingerprint=self.state.config.fingerprint,
            begun_on=self.state.run.begun_on,
        )
        return [*actions, Reply(to=sender, message=welcome), *self._advance(now)]

    def on_message(
        self,
        sender: SessionKey,
        message: AnyMessage,
        seq: int | None,
        now: float,
        facts: TokenFacts | Gathered | None = None,
    ) -> list[Action]:
        """Handle any message of a session. A sequenced one is acknowledged, even if it is a duplicate or refused.

        ``facts``: of a Chunk's tokens, or what is in Chunks.
        """
        self.peers.listen(now)
        peer = self.peers.get(sender)
        kind = message_type(message)
        if peer is None:
            return [refused(sender, UNKNOWN_SESSION, kind)]
        self.peers.hear(peer, now)
        if not isinstance(message, SEQUENCED):
            number = STATUS_WEIGHT if isinstance(message, StatusRequest) else 1
            said = self._held_against(peer.subjects, "messages", now, number)
            if self.quotas.ignores(peer.subjects, now):
                return [*said, Offence(by=sender, reason="messages")]
        return self._judged(self._on_message(peer, message, seq, now, facts), now)

    def _on_message(
        self, peer: Peer, message: AnyMessage, seq: int | None, now: float, facts: TokenFacts | Gathered | None
    ) -> list[Action]:
        sender, kind = peer.key, message_type(message)
        if not isinstance(message, ALLOWED[peer.role]):
            return [refused(sender, f"{kind}: not expected from a {peer.role}", kind)]
        if not isinstance(message, SEQUENCED):
            return [*self._handle(peer, message, now, facts), *self._advance_after(message, now)]
        if seq is None:
            return [refused(sender, f"{kind}: has no sequence number, and must arrive", kind)]
        if not peer.inbox.offer(seq):
            return [Reply(to=sender, message=Ack(next_seq=peer.inbox.next_seq))]
        actions = self._handle(peer, message, now, facts)
        if isinstance(message, Finish) and any(isinstance(action, Save) for action in actions):
            self.quotas.finished(peer.subjects, now)
        ack = Reply(to=sender, message=Ack(next_seq=peer.inbox.committed()))
        return [*actions, ack, *self._advance_after(message, now)]

    def on_undelivered(self, trajectory_id: int, epoch: int, reason: str, now: float) -> list[Action]:
        """Handle a Lease that could not be sent; ``reason`` says why it never can be, and is empty if the peer is away."""
        return self._judged([*self.leases.undelivered(trajectory_id, epoch, reason), *self._advance(now)], now)

    def on_unreadable_batch(self, sender: SessionKey, index: int, reason: str, now: float) -> list[Action]:
        """Handle a batch that could not be read or encoded for ``sender``."""
        return [*self.training.on_unreadable(sender, index, reason), *self._advance(now)]

    def on_tasks_added(self, added: AddedTasks) -> list[Action]:
        """Add training tasks."""
        return self.state.add_tasks(added)

    def reshelve(self, contents: LedgerContents) -> None:
        """Take the answer to ``Reshelve``: everything on disk, once the round is durable."""
        self.state.reshelve(contents)

    def on_tick(self, now: float) -> list[Action]:
        """Time has passed: leases expire, silent peers are forgotten, a waiting learner hears what it waits for."""
        self.peers.listen(now)
        gone: list[Action] = []
        for peer in self.peers.prune(now):
            gone += self._forgotten(peer, "silent")
        if now - self._forgiven_at >= FORGIVE_EVERY_S:
            self._forgiven_at = now
            gone += self._changed(self.quotas.forgive(now), now)
        return self._judged([*self.leases.expire(now, learner_waits=self.training.waits), *gone, *self._advance(now)], now)

    def on_end(self) -> list[Action]:
        """Note that the broker ends in order. A stop is over if it was carried out and the learner has left;
        otherwise the next broker continues it.
        """
        if self.peers.of_role("learner") or not self.state.finished:
            return []
        return self.state.stop_is_over()

    def status(self, now: float) -> dict[str, Any]:
        """The run as plain data, for display."""
        return {
            **status_of(self.state, self.peers, self.fleet, self.training, now),
            "limited": self.quotas.limited(now),
        }

    def _handle(self, peer: Peer, message: Message, now: float, facts: TokenFacts | Gathered | None) -> list[Action]:
        sender = peer.key
        match message:
            case LeaseRequest():
                peer.policy_version = message.policy_version
                is_serving = self.fleet.state(sender.peer) == "serving"
                if self._is_outlier(sender, lambda each: self.quotas.is_slowed(each.subjects)):
                    if not self.quotas.may_lease(peer.subjects, now):
                        return self.leases.on_slowed(sender, message, SLOWED_RETRY_S)
                    message = replace(message, capacity=min(message.capacity, SLOWED_LEASES))
                return self.leases.on_lease_request(sender, message, now, is_serving=is_serving)
            case Chunk() | Chunks():
                return self.holders.on_tokens(sender, message, facts, now)
            case Journal():
                return self.holders.on_journal(sender, message, now)
            case Finish() | Graded():
                return self.holders.on_end(sender, message, now)
            case Release():
                return self.holders.on_release(sender, message)
            case Heartbeat() if peer.role == "learner":
                return [self.leases.pulse(sender)]  # These only show that the sender is alive.
            case Heartbeat():
                self.peers.heartbeat(sender, message)
                changes = self.fleet.changes(sender.peer, message.status, "heartbeat")
                return [*changes, *self.leases.on_heartbeat(sender, message, now)]
            case Goodbye():
                return self._on_goodbye(peer, message, now)
            case StatusRequest():
                return [Reply(to=sender, message=Status(status=self.status(now)))]
            case RequeueRequest():
                return self._on_requeue(sender, message)
            case StopRequest():
                return self.state.stop(f"stopped by {sender.peer}: {message.reason}")
            case _:
                return self._handle_learners(sender, message, now)

    def _handle_learners(self, sender: SessionKey, message: Message, now: float) -> list[Action]:
        match message:
            case BatchRequest():
                return self.training.on_batch_request(sender, message)
            case BatchPartRequest():
                return self.training.on_part_request(sender, message)
            case Published():
                return self.training.on_published(sender, message)
            case Trained():
                return self.training.on_trained(sender, message, now)
            case BatchFailed():
                return self.training.on_failed(sender, message)
            case Checkpointed():
                return self.training.on_checkpointed(sender, message)
            case Resume():
                return self.training.on_resume(sender, message)
            case _:
                raise AssertionError(f"{message_type(message)} is allowed and not handled")

    def _on_goodbye(self, peer: Peer, goodbye: Goodbye, now: float) -> list[Action]:
        """The sender's leases and its place are free at once."""
        self.peers.leave(peer.key)
        fields = {
            "peer": peer.key.peer,
            "session": peer.key.tag,
            "role": peer.role,
            "reason": goodbye.reason,
        }
        if peer.role == "learner":
            self.training.session_ended()
            gone = self.state.change_run(learner_peer="", learner_session="", learner_batch=None)
            return [*gone, Note(event="goodbye", fields=fields)]
        ended: list[Action] = [*self.leases.session_ended(peer.key, now), Note(event="goodbye", fields=fields)]
        return [*self._left(peer, goodbye.reason or "goodbye"), *ended]

    def _left(self, peer: Peer, reason: str) -> list[Note]:
        """Mark a rollout as gone. Only the end of a rollout's session does so, whatever name another peer has."""
        return self.fleet.changes(peer.key.peer, "gone", reason) if peer.role == "rollout" else []

    def _on_requeue(self, sender: SessionKey, request: RequeueRequest) -> list[Action]:
        try:
            return self.state.requeue(request.batches, sender.peer)
        except ValueError as error:
            return [refused(sender, f"requeue_request: {error}", "requeue_request")]

    def _forgotten(self, peer: Peer, reason: str) -> list[Action]:
        fields = {"peer": peer.key.peer, "role": peer.role, "reason": reason}
        return [Note(event="peer_forgotten", fields=fields), *self._left(peer, reason)]

    # --- quotas -------------------------------------------------------------------------------------------------------

    def _judged(self, actions: list[Action], now: float) -> list[Action]:
        """The same actions, and what follows from the faults among them. A message that is refused is a fault, too."""
        refusals = [each.to for each in actions if isinstance(each, Reply) and isinstance(each.message, Refused)]
        judged = [*actions, *(Offence(by=sender, reason="refused") for sender in refusals)]
        for offence in [each for each in judged if isinstance(each, Offence)]:
            peer = self.peers.get(offence.by)
            who = subjects_of("rollout", offence.by.peer, NOBODY) if peer is None else peer.subjects
            judged += self._held_against(who, offence.reason, now)
        return judged

    def _held_against(
        self, who: tuple[Subject, ...], reason: OffenceReason, now: float, number: float = 1.0
    ) -> list[Action]:
        return self._changed(self.quotas.count(who, reason, now, number), now)

    def _changed(self, changes: list[Change], now: float) -> list[Action]:
        """What follows from changes of standing: a peer that is shut out has no session and no leases any more."""
        actions: list[Action] = []
        for event, subject, fields in changes:
            level = "info" if event == "peer_forgiven" else "warning"
            actions.append(Note(event=event, fields={"peer": str(subject), **fields}, level=level))
            if event == "peer_shut_out":
                for peer in self.peers.of_subject(subject):
                    actions.append(shut_out(peer.key, fields["seconds"]))
                    ended = self.leases.session_ended(peer.key, now)
                    self.peers.leave(peer.key)
                    actions += [*self._left(peer, "shut out"), *ended]
        return actions

    def _discounts(self, sender: SessionKey) -> bool:
        """Whether a rollout's failed attempts count against nothing but itself: it has caused many of those that would end
        the run, and another one that serves has not.
        """
        config = self.state.config
        most = config.failure_budget * config.max_attempts / ATTEMPTS_SHARE
        return self._is_outlier(sender, lambda each: self.quotas.attempts(each.subjects) > most)

    def _is_outlier(self, sender: SessionKey, is_bad: Callable[[Peer], bool]) -> bool:
        """Whether a rollout's faults are its own: another one that serves has none."""
        peer = self.peers.get(sender)
        if peer is None or not is_bad(peer):
            return False
        others = (other for other in self.peers.of_role("rollout") if self.fleet.state(other.key.peer) == "serving")
        return any(not is_bad(other) for other in others)

    def _advance_after(self, message: Message, now: float) -> list[Action]:
        """Advance, unless the message is frequent: such messages complete no group, and the next tick sees the rest."""
        frequent = (LeaseRequest, BatchPartRequest, Chunk, Chunks, Journal, Heartbeat)
        return [] if isinstance(message, frequent) else self._advance(now)

    def _advance(self, now: float) -> list[Action]:
        return [*self.state.start_evaluations_that_are_due(), *self.training.advance(now)]
