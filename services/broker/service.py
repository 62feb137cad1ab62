"""The broker's shell: receive, decide, make durable, answer. Nothing leaves before its commit; the next round is decided
meanwhile.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

import structlog
from msgspec.structs import replace

from gspo.tasks.environments import TaskSource
from gspo_protocol.channels import ChannelSpec
from gspo_protocol.codec import Array, decode, encode, message_type
from gspo_protocol.limits import MAX_QUEUED, MAX_QUEUED_BYTES, MAX_REASON_CHARS, MAX_TASK_BYTES, MAX_UNSEQUENCED
from gspo_protocol.messages import FOR_ONE_LIFE, Ack, LeaseEnded, Message, Pulse, Refused, Welcome
from gspo_protocol.messages.base import require_plain
from gspo_protocol.sessions import shown_identity
from gspo_services.broker.ledger import (
    Action,
    Announce,
    AppendChunk,
    AppendChunks,
    DeliverBatch,
    DeliverParts,
    GrantLease,
    Ledger,
    Note,
    Offence,
    Reply,
    Reshelve,
    Save,
    SessionKey,
    WriteMetrics,
)
from gspo_services.broker.metrics import BrokerMetrics
from gspo_services.broker.metrics_file import MetricsFile
from gspo_services.broker.outgoing import NO_TOKENS, grade_message, lease_message
from gspo_services.broker.refresh import Refresh
from gspo_services.broker.retention import Retention
from gspo_services.broker.rounds import Committer, DecidedRound, NextRound
from gspo_services.broker.rows import AdditionRow, CheckpointedRow, TrajectoryRow
from gspo_services.broker.sending import BatchSender
from gspo_services.broker.sessions import Answer, Arrival, Sessions
from gspo_services.broker.store import Payload, RowChanges, Store, StoreCorrupt, stored_chunk, stored_chunks
from gspo_services.shared.net import FairQueue, RouterChannel
from gspo_services.shared.runtime.clock import Clock
from gspo_services.shared.runtime.logs import OccasionalLog
from gspo_services.shared.runtime.telemetry import Health

log = structlog.get_logger()
T = TypeVar("T")

TICK_S: Final = 0.25
NOTES_AT_ONCE: Final = 8
"""Lines of one event about one peer that the log takes at once; ten seconds later it takes as many again..."""
MAX_NOTE_KEYS: Final = 256
"""...and beyond this many pairs of event and peer, all others of the event count as one."""


class BrokerService:
    """One run's broker between its two sockets and its store.

    ``wall_s`` gives seconds since 1970 for metrics.jsonl; all else runs on ``clock``. ``keeps_experts``: those that engines
    report are stored, and go to the learner.
    """

    def __init__(
        self,
        ledger: Ledger,
        store: Store,
        channels: dict[ChannelSpec, RouterChannel],
        tasks: dict[str, TaskSource],
        metrics_file: MetricsFile,
        metrics: BrokerMetrics,
        health: Health,
        clock: Clock,
        wall_s: Callable[[], float],
        *,
        commit_interval_s: float,
        part_tokens: int,
        keeps_experts: bool = False,
        retention: Retention | None = None,
        refresh: Refresh | None = None,
    ) -> None:
        self._ledger = ledger
        self._store = store
        self._channels = channels
        self._tasks = tasks
        self._metrics_file = metrics_file
        self._metrics = metrics
        self._health = health
        self._clock = clock
        self._wall_s = wall_s
        self._commit_interval_s = commit_interval_s
        self._keeps_experts = keeps_experts
        self._retention = retention
        self._refresh = refresh
        self._started = clock.now() - store.elapsed_s()
        self._last_tick = clock.now()
        self._arrivals: FairQueue[Arrival] = FairQueue(max_messages=MAX_QUEUED, max_bytes=MAX_QUEUED_BYTES)
        self._arrived = asyncio.Event()
        self._sessions = Sessions(ledger, channels, metrics, clock, store.contradiction)
        self._notes = OccasionalLog(log, clock, burst=NOTES_AT_ONCE, max_keys=MAX_NOTE_KEYS)
        self._undelivered: list[tuple[GrantLease, str]] = []
        self._metrics_file_is_behind = True
        # The store has one connection, used by this one thread.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")
        self._next = NextRound()
        self._committer = Committer(store, self._in_thread, self._next, metrics, health, clock)
        self._batches = BatchSender(store, self._in_thread, self._send, part_tokens=part_tokens, with_experts=keeps_experts)
        # By this process's clock, whatever the time is on the machine that watches.
        metrics.quiet.set_function(lambda: ledger.training.quiet_s(clock.now()))

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until ``stop`` is set. What has come in by then is committed and answered."""
        try:
            async with asyncio.TaskGroup() as tasks:
                receivers = [
                    tasks.create_task(self._receive(spec, channel), name=f"receive-{spec.name}")
                    for spec, channel in self._channels.items()
                ]
                if self._retention is not None:
                    receivers.append(tasks.create_task(self._retention.run(self._commit_archived), name="retention"))
                if self._refresh is not None:
                    receivers.append(tasks.create_task(self._refresh.run(), name="refresh"))
                receivers.append(tasks.create_task(self._decide_rounds(stop), name="decide"))
                await self._finish_rounds(stop)
                for receiver in receivers:
                    receiver.cancel()
        finally:
            self._thread.shutdown()

    async def _receive(self, spec: ChannelSpec, channel: RouterChannel) -> None:
        """Read one socket, always: ZeroMQ's own queues have no bounds.

        produces:     arrivals; what a peer sends above its credit is dropped, unacknowledged
        waits for:    messages
        unblocked by: peers
        """
        while True:
            incoming = await channel.receive()
            taken = self._arrivals.offer(
                (spec.name, incoming.peer),
                Arrival(spec=spec, incoming=incoming),
                incoming.num_bytes,
                max_messages=spec.window + MAX_UNSEQUENCED,
                max_bytes=spec.max_waiting_bytes,
            )
            if taken:
                self._arrived.set()
            else:
                self._metrics.messages_dropped.labels(spec.name).inc()
                channel.unwanted(incoming)

    async def _decide_rounds(self, stop: asyncio.Event) -> None:
        """Gather what arrived and decide, into the round that is taken when the one before is durable.

        produces:     rounds
        waits for:    arrivals, at most a tick; room in the round
        unblocked by: the receivers; ``_finish_rounds``; ``stop``
        """
        is_last = False
        while not is_last:
            await self._next.room()
            is_last = stop.is_set()
            arrivals = await self._gather()
            self._decide(arrivals, self._next.open)
            if is_last:
                self._sort(self._ledger.on_end(), {}, self._next.open)
            self._next.open.is_last = is_last
            self._next.decided(len(arrivals))

    async def _finish_rounds(self, stop: asyncio.Event) -> None:
        """Commit a round once, answer, and take the next one.

        produces:     rows, replies, leases, batches; of a batch's parts one in each round
        waits for:    what is decided; a commit, however long the disk refuses
        unblocked by: ``_decide_rounds``; space on the disk; ``stop``
        """
        is_last = False
        while not is_last:
            round_ = self._next.take_now() if self._batches.has_parts else await self._next.take()
            is_last, changes = round_.is_last, round_.changes
            if changes and not await self._committer.commit(changes, stop):
                return
            if self._retention is not None and any(isinstance(row, CheckpointedRow) for row in changes.rows):
                self._retention.wake()
            if self._refresh is not None and any(isinstance(row, AdditionRow) for row in changes.rows):
                self._refresh.is_durable()
            self._metrics_file_is_behind |= bool(changes.lines)
            await self._carry_out(round_.effects)
            await self._batches.send_next()
            # Only now: a peer that was refused for good must hear it first.
            self._sessions.forget(round_.gone)
            await self._bring_metrics_file_up_to_date()
            self._next.done()
            self._health.progress()

    async def _gather(self) -> list[Arrival]:
        if not self._arrivals:
            self._arrived.clear()
            try:
                async with asyncio.timeout(TICK_S):
                    await self._arrived.wait()
            except TimeoutError:
                return []
        else:
            await asyncio.sleep(0)  # The receivers read in each round, however much is waiting.
        if self._commit_interval_s:
            await asyncio.sleep(self._commit_interval_s)
        taken: list[Arrival] = []
        while self._arrivals:
            taken.append(self._arrivals.take())
            if not self._next.add(taken[-1].num_events, taken[-1].incoming.num_bytes):
                break
        return taken

    # --- decide -------------------------------------------------------------------------------------------------------

    def _decide(self, arrivals: list[Arrival], into: DecidedRound) -> None:
        """Add the ledger's actions to a round."""
        now = self._clock.now()
        for grant, reason in self._undelivered:
            self._sort(self._ledger.on_undelivered(grant.trajectory_id, grant.epoch, reason, now), {}, into)
        self._undelivered.clear()
        for sender, index, reason in self._batches.unreadable:
            self._sort(self._ledger.on_unreadable_batch(sender, index, reason, now), {}, into)
        self._batches.unreadable.clear()
        if self._refresh is not None and (added := self._refresh.take()) is not None:
            self._sort(self._ledger.on_tasks_added(added), {}, into)
        for arrival in arrivals:
            received = arrival.incoming.received
            arrays = {} if received is None else received.arrays
            self._sort(self._sessions.actions(arrival, now), arrays, into)
        if now - self._last_tick >= TICK_S:
            self._last_tick = now
            self._sort(self._ledger.on_tick(now), {}, into)
            self._metrics.observe(self._ledger, len(self._arrivals), self._arrivals.num_bytes, now)
        into.gone = self._sessions.gone()

    def _sort(self, actions: list[Action], arrays: dict[str, Array], into: DecidedRound) -> None:
        """What must be durable goes into the round's changes, the rest into its effects."""
        changes = into.changes
        for action in actions:
            match action:
                case Save(row=row):
                    changes.rows.append(row)
                    if isinstance(row, TrajectoryRow) and row.status == "finished":
                        self._metrics.trajectory_tokens.labels("finished").observe(row.num_tokens)
                case AppendChunk(chunk=chunk, peer=peer):
                    experts = self._kept(arrays.get("experts"), peer)
                    changes.chunks.append(stored_chunk(chunk, arrays["token_ids"], arrays["logprobs"], peer, experts))
                    self._metrics.took(1, chunk.num_tokens)
                case AppendChunks(chunks=chunks, stretches=stretches, rows=rows, peer=peer):
                    changes.rows += rows
                    changes.chunks += stored_chunks(chunks, stretches, peer)
                    self._metrics.took(
                        sum(len(each.places) for each in stretches), sum(each.num_tokens for each in stretches)
                    )
                case WriteMetrics(line=line):
                    changes.lines.append({**line, "time": self._wall_s(), "time_s": self._clock.now() - self._started})
                    self._metrics.count(line)
                case _:
                    into.effects.append(action)

    def _kept(self, experts: Array | None, peer: str) -> Array | None:
        """What is stored of the experts that an engine reported; None: nothing."""
        if experts is None or self._keeps_experts:
            self._metrics.expert_bytes.inc(0 if experts is None else experts.nbytes)
            return experts
        self._notes.warning(
            "experts_not_kept",
            peer,
            peer=peer,
            remedy='give all processes the same objective.routing_replay_from = "engine"',
        )
        return None

    # --- make durable ----------------------------------------------------------------------------------------------

    async def _commit_archived(self, changes: RowChanges) -> None:
        """Between two rounds. Raises: StoreUnavailable."""
        await self._in_thread(lambda: self._store.commit(changes))

    async def _bring_metrics_file_up_to_date(self) -> None:
        if not self._metrics_file_is_behind:
            return
        try:
            await self._in_thread(lambda: self._metrics_file.append(self._store.metrics_after(self._metrics_file.last)))
        except OSError as error:
            log.error("metrics_file_not_written", file=str(self._metrics_file.path), error=str(error))
            return
        self._metrics_file_is_behind = False
        self._metrics.database_bytes.set(await self._in_thread(lambda: self._store.num_bytes))

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    # --- carry out ----------------------------------------------------------------------------------------------------

    async def _carry_out(self, effects: list[Action]) -> None:
        # A round acknowledges each sender once, with its last Ack, and in its place: a learner that has left hears it before
        # the next one is welcomed.
        last_acks = {each.to: each for each in effects if isinstance(each, Reply) and isinstance(each.message, Ack)}
        for action in effects:
            match action:
                case Reply(to=sender, message=Ack() as ack):
                    if last_acks[sender] is action:
                        await self._send(sender, ack)
                case Reply(to=sender, message=message):
                    self._count_reply(sender, message)
                    await self._reply(sender, message)
                case Answer(spec=spec, identity=identity, message=message):
                    await self._channels[spec].send(identity, message)
                case Announce(message=message):
                    await self._announce(message)
                case GrantLease():
                    await self._send_lease(action)
                case DeliverBatch(to=sender, index=index):
                    await self._batches.announce(sender, index)
                case DeliverParts():
                    self._batches.want(action)
                case Reshelve():
                    self._ledger.reshelve(await self._in_thread(self._store.contents))
                case Note(event=event, fields=fields, level=level):
                    self._say(event, fields, level)
                case Offence(reason=reason):
                    self._metrics.offences.labels(reason).inc()
                case _:
                    raise AssertionError(f"{type(action).__name__} is not carried out")

    async def _reply(self, sender: SessionKey, message: Message) -> None:
        """Send an answer. One that its receiver could not decode must not end the broker: the receiver hears why instead."""
        kind = message_type(message)
        try:
            if not isinstance(message, Ack | Pulse):
                decode(encode(message))
            await self._send(sender, message)
        except (ValueError, TypeError, OverflowError) as error:
            reason = f"{kind}: the broker cannot send its answer: {error}"[:MAX_REASON_CHARS]
            self._notes.log("answer_not_sent", ("answer_not_sent", kind), "warning", peer=sender.peer, reason=reason)
            self._metrics.refused.labels(kind, "unsendable").inc()
            await self._send(sender, Refused(reason=reason, message_type=kind))

    def _say(self, event: str, fields: dict[str, Any], level: str) -> None:
        """Log a note; what peers can cause as often as they like is logged at a bounded rate."""
        if "peer" in fields:
            self._notes.log(event, (event, fields["peer"]), level, **fields)
        else:
            (log.warning if level == "warning" else log.info)(event, **fields)

    async def _send(self, sender: SessionKey, message: Message, arrays: dict[str, Array] | None = None) -> bool:
        """Send; False if the peer is gone or slow. It asks again: a message that must arrive is requested until it does."""
        route = self._sessions.route(sender)
        if route is None:
            return False
        if isinstance(message, FOR_ONE_LIFE):
            # The connection may already belong to the next process with this name.
            message = replace(message, session=sender.session)
        if isinstance(message, Welcome | Ack):
            message = replace(message, commit=self._store.told)
        sent = await self._channels[route.spec].send(route.identity, message, arrays)
        if not sent:
            log.debug("peer_unreachable", peer=sender.peer, type=message_type(message))
        return sent

    async def _announce(self, message: Message) -> None:
        """Best effort: a rollout that this does not reach hears the same with its next Pulse."""
        identities: dict[ChannelSpec, list[bytes]] = {}
        for peer in self._ledger.peers.of_role("rollout"):
            route = self._sessions.route(peer.key)
            if route is not None:
                identities.setdefault(route.spec, []).append(route.identity)
        for spec, of_channel in identities.items():
            for identity in await self._channels[spec].send_to_each(of_channel, message):
                log.debug("peer_unreachable", peer=shown_identity(identity), type=message_type(message))

    async def _send_lease(self, grant: GrantLease) -> None:
        payload, journal, answers = NO_TOKENS, list[bytes](), list[Payload]()
        try:
            if grant.num_tokens or grant.num_entries:
                payload, journal = await self._in_thread(lambda: self._store.resumable(grant.trajectory_id))
            for member in grant.members:
                answers.append(await self._in_thread(partial(self._store.payload, member.trajectory_id)))
        except StoreCorrupt as error:
            return self._give_up_lease(grant, error)
        try:
            task = dict(self._tasks[grant.source].task(grant.task_index))
            require_plain("task", task, MAX_TASK_BYTES)  # A lease that resumes has to carry a state beside it.
        # The environment is the user's own code: whatever it raises concerns this task only.
        except Exception as error:
            log.exception("task_failed", source=grant.source, task_index=grant.task_index)
            self._give_up_lease(grant, error)
            return
        lease_s = self._ledger.state.config.lease_s
        try:
            message: Message
            if grant.members:
                message, arrays = grade_message(grant, task, answers)
            else:
                message, arrays = lease_message(grant, task, payload, journal, lease_s)
            sent = await self._send(grant.to, message, arrays)
        except (TypeError, ValueError, OverflowError) as error:  # not plain data, or too large for a message
            self._give_up_lease(grant, error)
            return
        if sent:
            self._metrics.leases_granted.inc()
        else:
            self._undelivered.append((grant, ""))

    def _give_up_lease(self, grant: GrantLease, error: Exception) -> None:
        """The next round counts the attempt as failed; its log line and the group's give the reason."""
        reason = f"task {grant.task_index} ({grant.source}) cannot be leased: {type(error).__name__}: {error}"
        self._undelivered.append((grant, reason))

    def _count_reply(self, sender: SessionKey, message: Message) -> None:
        if isinstance(message, LeaseEnded):
            self._metrics.leases_ended.inc()
        elif isinstance(message, Refused):
            self._sessions.count_refusal(sender, message)
