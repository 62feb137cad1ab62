"""Bugs to plant in the services: each breaks one promise, and the audit must find it.

A bug is a change of source text. The module is compiled again with it, and the functions that differ lend their code to the
real ones while the bug is planted: nothing on disk changes, and a module that has already imported a function runs the bug,
too.
"""

import importlib
import inspect
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from tests.simulation.weather import STANDBY, Event, Plan, Poison, plan_of


@dataclass(frozen=True, kw_only=True)
class Bug:
    """One bug. ``invariants``: beginnings of the names under which it may be caught. ``weather`` is added to a plan's own,
    so that what the bug needs happens soon."""

    name: str
    module: str
    old: str
    new: str
    invariants: tuple[str, ...]
    weather: tuple[Event, ...] = ()
    seed: int = 0
    """The first seed to try."""
    is_deterministic: bool | None = None
    """Whether training is; None: as the seed has it."""

    def plan(self, seed: int) -> Plan:
        """The run of a seed, in this bug's weather."""
        plan = plan_of(seed)
        if self.is_deterministic is not None:
            plan = replace(plan, is_deterministic=self.is_deterministic)
        return plan.with_events(tuple(sorted((*plan.events, *self.weather), key=lambda event: event.at)))


def _learner_dies_while_it_publishes() -> tuple[Event, ...]:
    """The learner dies as it publishes; at times the broker is down, too, and does not hear of it."""
    events: list[Event] = []
    for at in (1.0, 4.0, 8.0):
        events.append(Event(at=at, kind="kill_when", target=("broker",), seconds=1.0, point="publishing"))
        events.append(Event(at=at, kind="kill_when", target=("learner",), seconds=1.0, amount=0.1, point="publishing"))
    return tuple(events)


def _one_rollout_keeps_old_weights() -> tuple[Event, ...]:
    """One rollout keeps old weights and gets trajectories that another began."""
    events = [Event(at=0.0, kind="join", target=("rollout-late",))]
    for at in (1.0, 8.0, 15.0):
        events.append(Event(at=at, kind="partition", target=("rollout-0", "learner"), seconds=6.0))
        events.append(Event(at=at + 4.0, kind="kill", target=("rollout-late",), seconds=0.5))
    return tuple(events)


def _learner_dies_after_a_checkpoint() -> tuple[Event, ...]:
    """The learner dies just after a checkpoint that the broker, down at the time, has not heard of."""
    events: list[Event] = []
    for at in (1.0, 4.0, 8.0):
        events.append(Event(at=at, kind="kill_when", target=("broker",), seconds=4.0, point="publishing"))
        events.append(Event(at=at, kind="kill_when", target=("learner",), seconds=1.0, amount=1.6, point="saving"))
    return tuple(events)


def _the_newest_checkpoint_is_damaged() -> tuple[Event, ...]:
    return tuple(
        Event(at=at, kind="damage_checkpoint", target=("learner",), seconds=1.0, amount=amount)
        for at, amount in ((4.0, 0.3), (7.0, 0.6), (10.0, 0.45))
    )


def _a_learner_sleeps_until_its_successor_has_begun() -> tuple[Event, ...]:
    """A learner is cut off from the broker and sleeps; when it wakes up, another one has the run, and it trains on."""
    return (
        Event(at=0.5, kind="second_learner", target=(STANDBY,)),
        *(Event(at=at, kind="partition", target=("learner", "broker"), seconds=12.0) for at in (2.0, 18.0)),
        *(Event(at=at, kind="suspend", target=("learner",), seconds=7.0) for at in (2.5, 18.5)),
    )


def _the_broker_dies_after_its_commits() -> tuple[Event, ...]:
    """The broker dies after a commit, before it acknowledges: rollouts send again what is stored."""
    moments = (1.0, 3.0, 5.0, 8.0, 11.0, 14.0)
    return tuple(Event(at=at, kind="kill_when", target=("broker",), seconds=0.5, point="committed") for at in moments)


def _a_rollout_sleeps_as_long_as_a_lease() -> tuple[Event, ...]:
    """A rollout sleeps as long as a lease, and the rollout that gets its trajectories is slow."""
    events = [
        Event(at=0.0, kind="join", target=("rollout-late",)),
        Event(at=0.5, kind="slow", target=("rollout-late",), seconds=30.0, amount=2.0),
    ]
    for at, seconds in ((1.0, 4.5), (7.0, 8.7), (17.0, 5.5), (24.0, 9.5)):
        events.append(Event(at=at, kind="suspend", target=("rollout-0",), seconds=seconds))
    return tuple(events)


def _poison(kind: Poison, *more: Event) -> tuple[Event, ...]:
    """The first batch is poison, and ``more``."""
    return (Event(at=0.0, kind="poison", target=(kind,), amount=0.0), *more)


def _an_old_copy_is_put_back() -> tuple[Event, ...]:
    """Copies of half a second ago, so that mostly nothing but the mark knows of what is lost."""
    return tuple(Event(at=at, kind="damage", target=("broker",), seconds=0.5) for at in (1.0, 5.0, 9.0, 14.0))


HOSTILE = tuple(Event(at=at, kind="hostile") for at in (2.0, 10.0))
"""A peer that the broker admits breaks every rule."""


def _engines_lie() -> tuple[Event, ...]:
    """Engines report tokens that no such model can have made."""
    return tuple(Event(at=at, kind="engine_lies", target=("rollout-0",), amount=3.0) for at in (2.0, 5.0, 8.0, 11.0))


BUGS = (
    Bug(
        name="acknowledge before the commit",
        module="services.broker.service",
        old="            if changes and not await self._commit(changes, stop):\n"
        "                return\n"
        "            if self._retention is not None and any(isinstance(row, CheckpointedRow) for row in changes.rows):\n"
        "                self._retention.wake()\n"
        "            await self._carry_out(effects)\n",
        new="            await self._carry_out(effects)\n"
        "            if changes and not await self._commit(changes, stop):\n"
        "                return\n"
        "            if self._retention is not None and any(isinstance(row, CheckpointedRow) for row in changes.rows):\n"
        "                self._retention.wake()\n",
        invariants=("G1", "G2"),
    ),
    Bug(
        name="a lease's epoch is not checked",
        module="services.broker.ledger.leases",
        old='row.status != "leased" or row.epoch != epoch:\n            return None\n        return row if sender',
        new='row.status != "leased":\n            return None\n        return row if sender or sender',
        invariants=("G1",),
        weather=_a_rollout_sleeps_as_long_as_a_lease(),
        seed=66,
    ),
    Bug(
        name="a lease does not raise the epoch",
        module="services.broker.ledger.group_states",
        old="epoch=row.epoch + 1,",
        new="epoch=max(row.epoch, 1),",
        invariants=("G1",),
        seed=1,
    ),
    Bug(
        name="a chunk may overlap what is stored",
        module="services.broker.ledger.leases",
        old="        if row.lease_start <= chunk.offset and end <= row.num_tokens:\n"
        "            return []  # delivered again after a broker restart\n"
        "        if chunk.offset != row.num_tokens:",
        new="        if chunk.offset > row.num_tokens:",
        invariants=("G1", "no process ends by itself"),
        weather=_the_broker_dies_after_its_commits(),
    ),
    Bug(
        name="a message after a gap is accepted",
        module="protocol.delivery",
        old="        if seq != self._expected:\n            return False\n        self._expected += 1",
        new="        if seq < self._expected:\n            return False\n        self._expected = seq + 1",
        invariants=("G1", "liveness", "no peer"),
        weather=(Event(at=1.0, kind="loss", seconds=12.0, amount=0.2),),
    ),
    Bug(
        name="the window of unacknowledged messages is unlimited",
        module="protocol.delivery",
        old="return len(self._unacked) < self._window and self._num_bytes < self._window_bytes",
        new="return True",
        invariants=("G6",),
        seed=1,
    ),
    Bug(
        name="a connection that answers nothing is kept",
        module="services.runtime.net.peer",
        old="        verdict = self._liveness.look(now)\n",
        new='        verdict = "fine"\n',
        invariants=("liveness",),
        weather=tuple(
            Event(at=at, kind="half_open", target=pair)
            for at in (1.0, 3.0, 5.0)
            for pair in (("learner", "broker"), ("rollout-0", "broker"), ("rollout-0", "learner"))
        ),
    ),
    Bug(
        name="a resumed trajectory is granted without its last chunk",
        module="services.broker.store.reader",
        old="return join(rows)",
        new="return join(rows[:-1])",
        invariants=("G1", "poison", "no process ends by itself"),
    ),
    Bug(
        name="admission ignores the oldest version of a group under way",
        module="services.broker.ledger.leases",
        old="return window.extend(",
        new="return True or (",
        invariants=("G3", "G4"),
        weather=_one_rollout_keeps_old_weights(),
        seed=38,
    ),
    Bug(
        name="a batch may leave out groups that must not get older",
        module="services.broker.ledger.admission",
        old="if is_last_of_version and num_left > allowed:",
        new="if False:",
        invariants=("G3",),
        seed=17,
    ),
    Bug(
        name="groups that are too old are trained",
        module="services.broker.ledger.admission",
        old="return max(1, version - self.max_lag)",
        new="return 1",
        invariants=("G3", "G4", "no process ends by itself"),
    ),
    Bug(
        name="a prompt is skipped",
        module="services.broker.ledger.state",
        old="self.next_prompt += 1",
        new="self.next_prompt += 2",
        invariants=("G2 no prompt",),
    ),
    Bug(
        name="a group is forgotten with the broker's memory",
        module="services.broker.ledger.state",
        old="return group.group_id, [Save(row=group), *saves(self.groups.members(group.group_id))]",
        new="return group.group_id, saves(self.groups.members(group.group_id))",
        invariants=("G2", "no error", "no process"),
    ),
    Bug(
        name="a batch is delivered again in another order",
        module="services.broker.store.reader",
        old='for trajectory in self.rows(TrajectoryRow, "WHERE group_id = ? ORDER BY trajectory_id"',
        new='for trajectory in self.rows(TrajectoryRow, "WHERE group_id = ? ORDER BY '
        '(trajectory_id * 7919 + (SELECT count(*) FROM trained)) % 13"',
        invariants=("G2",),
        seed=1,
    ),
    Bug(
        name="a batch that comes twice is trained twice",
        module="services.learner.broker.loop",
        old="if wanted is None or message.index != wanted.index:",
        new="if False:",
        invariants=("G2", "G6"),
    ),
    Bug(
        name="a resumed learner starts one batch too late",
        module="services.learner.service",
        old="self._next_batch = self._saved_batch = state.batch_position",
        new="self._next_batch = self._saved_batch = state.batch_position + 1",
        invariants=("G2", "no peer"),
        seed=6,
    ),
    Bug(
        name="a version that the broker has not heard of is used again for other weights",
        module="services.learner.checkpoints.versions",
        old="self._newest = max(0 if note is None else note.newest, welcome.policy_version)",
        new="self._newest = welcome.policy_version",
        invariants=("one version, one content", "no process ends by itself"),
        weather=_learner_dies_while_it_publishes(),
        is_deterministic=False,
    ),
    Bug(
        name="a version is served before its digest is noted",
        module="services.learner.checkpoints.versions",
        old="digest=digest)\n        self._write()\n",
        new="digest=digest)\n",
        invariants=("one version, one content",),
        weather=_learner_dies_while_it_publishes(),
        is_deterministic=False,
    ),
    Bug(
        name="the same weights get a new number after a restart",
        module="services.learner.checkpoints.versions",
        old="if not known.digest or known.digest == weights.digest():",
        new="if False:",
        invariants=("G3 nothing is dropped as stale",),
        is_deterministic=True,
    ),
    Bug(
        name="other weights keep the number after a restart",
        module="services.learner.checkpoints.versions",
        old="if not known.digest or known.digest == weights.digest():",
        new="if True:",
        invariants=("one version, one content", "no peer"),
        is_deterministic=False,
    ),
    Bug(
        name="a checkpoint's files are not verified",
        module="services.learner.checkpoints.digests",
        old="if digest != files[name]:",
        new="if False:",
        invariants=("G2 exactly once", "no process ends by itself", "one version, one content", "versions grow"),
        weather=_the_newest_checkpoint_is_damaged(),
        seed=7,
    ),
    Bug(
        name="an older checkpoint is not accepted",
        module="services.broker.ledger.training",
        old="if resume.next_batch < self._state.batches.checkpointed and self._session_has_checkpointed:",
        new="if resume.next_batch < self._state.batches.checkpointed:",
        invariants=("no peer",),
        weather=_the_newest_checkpoint_is_damaged(),
        seed=7,
    ),
    Bug(
        name="a learner publishes what it trains again",
        module="services.learner.service",
        old="if self._next_batch < self._newest_trained:\n            self._health.progress()\n            return",
        new="if False:\n            return",
        invariants=("no peer",),
    ),
    Bug(
        name="a checkpoint covers a batch whose report may be lost",
        module="services.learner.service",
        old="may_publish=acknowledged, wait_s",
        new="may_publish=True, wait_s",
        invariants=("the ledger is whole",),
        weather=_learner_dies_after_a_checkpoint(),
        seed=4,
    ),
    Bug(
        name="loaded weights are not verified",
        module="services.rollout.weights.sync",
        old=", check=lambda: self._verify(expected))",
        new=")",
        invariants=("G4", "G5"),
        seed=6,
    ),
    Bug(
        name="a delta is applied without a check",
        module="services.rollout.weights.replica",
        old="            if bytes.fromhex(digest)[:DIGEST_BYTES] != digests[index]:\n"
        "                raise ValueError(\n"
        '                    f"tensor {base.tensors[index].name} has digest {digest} now, expected '
        '{digests[index].hex()}..."\n'
        "                )\n"
        "            tensors[index] = structs.replace(tensors[index], digest=digest)\n"
        "        if version_digest(tensors) != delta.digest:\n",
        new="            tensors[index] = structs.replace(tensors[index], digest=digest)\n        if False:\n",
        # The engine gets unchecked weights, so that either promise may be seen broken first.
        invariants=("G5 a replica is", "G4 only engines"),
        seed=30,
    ),
    Bug(
        name="a snapshot's digests are not checked",
        module="services.rollout.weights.replica",
        old="if digest != expected:",
        new="if False:",
        invariants=("G5 a replica is", "G4 only engines", "G5 only whole"),
        seed=3,
    ),
    Bug(
        name="a failed update counts as served",
        module="services.rollout.weights.sync",
        old="self.policy_version, self.quarantined = 0, error",
        new='self.policy_version, self.quarantined = version, ""',
        invariants=("G4", "G5", "liveness"),
        seed=4,
    ),
    Bug(
        name="a lease request names the announced version",
        module="services.rollout.service",
        old="LeaseRequest(request_id=self._request_id, capacity=room, policy_version=self._sync.policy_version)",
        new="LeaseRequest(request_id=self._request_id, capacity=room, policy_version=self._sync._announced[0])",
        invariants=("G4",),
    ),
    Bug(
        name="all tokens of a piece get its last version",
        module="services.rollout.agent",
        old="versions = [run.version for run in piece.version_runs for _ in range(run.num_tokens)]",
        new="versions = [piece.version_runs[-1].version for run in piece.version_runs for _ in range(run.num_tokens)]",
        invariants=("G4",),
        seed=4,
    ),
    Bug(
        name="an episode is resumed with its first state",
        module="services.broker.store.payload",
        old="state = state if header.state is None else header.state",
        new="state = header.state if state is None else state",
        invariants=("G2 an episode",),
        seed=10,
    ),
    Bug(
        name="an unacknowledged message is never sent again",
        module="protocol.delivery",
        old="        if not self._unacked or now - self._last_progress < self._resend_s:\n            return ()\n",
        new="        if True:\n            return ()\n",
        invariants=("liveness",),
        seed=16,
    ),
    Bug(
        name="a second learner is welcomed while the first lives",
        module="services.broker.ledger.fencing",
        old="            self._require_silence(self.learner, sender, now)\n",
        new="",
        invariants=("one learner",),
        weather=(Event(at=3.0, kind="second_learner", target=(STANDBY,)),),
    ),
    Bug(
        name="a learner's message does not count as a sign of life",
        module="services.broker.ledger.fencing",
        old="        if peer.key == self.learner:\n            self._learner_heard_s = self._listened_s",
        new="        if peer.key == self.learner:\n            pass",
        invariants=("one learner",),
        weather=(Event(at=6.0, kind="second_learner", target=(STANDBY,)),),
    ),
    Bug(
        name="a learner that was cut off and its successor give one version to two weights",
        module="services.learner.checkpoints.versions",
        old="if note is not None and note.learner != self._learner:",
        new="if False:",
        invariants=("one version, one content", "G2 exactly once"),
        weather=_a_learner_sleeps_until_its_successor_has_begun(),
        is_deterministic=False,
    ),
    Bug(
        name="processes of one name share a connection",
        module="protocol.sessions",
        old='return f"{peer}/{session}#{number}" if number else f"{peer}/{session}"',
        new="return peer",
        invariants=("one learner", "liveness", "G1", "no peer", "no error is lost"),
        weather=(Event(at=2.0, kind="second_rollout", target=("rollout-0",)),),
    ),
    Bug(
        name="how often a batch failed is forgotten with the broker's memory",
        module="services.broker.store.reader",
        old='failures=tuple(self.rows(FailureRow, "WHERE batch >= ? ORDER BY batch", (checkpointed,))),',
        new="failures=(),",
        invariants=("poison", "liveness"),
        weather=_poison(
            "raises", Event(at=0.0, kind="kill_when", target=("broker",), seconds=1.0, amount=0.2, point="batch failed")
        ),
    ),
    Bug(
        name="a batch is set aside without a reason",
        module="services.broker.ledger.dead_letters.letters",
        old="reason=reason[:MAX_TEXT])",
        new='reason="")',
        invariants=("poison",),
        weather=_poison("raises"),
    ),
    Bug(
        name="a batch that was set aside is delivered",
        module="services.broker.ledger.training",
        old="        if reason:\n            skip = Reply(",
        new="        if False:\n            skip = Reply(",
        invariants=("poison",),
        weather=_poison("raises"),
    ),
    Bug(
        name="a batch is set aside when its learner was killed once",
        module="services.broker.ledger.dead_letters.failures",
        old="row.reported + row.silent < SILENT_MOST",
        new="row.reported + row.silent < 1",
        invariants=("poison",),
        weather=(Event(at=1.0, kind="kill_when", target=("learner",), seconds=1.0, amount=0.2, point="batch sent"),),
    ),
    Bug(
        name="ends without a word are not counted",
        module="services.broker.ledger.training",
        old="        rows = state.failures.ended_silently(index)\n        note",
        new="        rows = []\n        note",
        invariants=("liveness",),
        weather=_poison("dies"),
    ),
    Bug(
        name="a prompt that is sampled again loses its place",
        module="services.broker.ledger.state",
        old='"train", former.prompt, former.task_index,',
        new='"train", former.prompt + 1, former.task_index,',
        invariants=("G2 no prompt",),
        weather=_poison("raises", *(Event(at=at, kind="release") for at in (8.0, 14.0, 20.0))),
    ),
    Bug(
        name="tokens leave the ledger before their file is there",
        module="services.broker.retention",
        old="            await self._in_thread(lambda: writer.publish(row))\n"
        "            await commit(RowChanges(rows=[row, *archived]))\n",
        new="            await commit(RowChanges(rows=[row, *archived]))\n"
        "            await self._in_thread(lambda: writer.publish(row))\n",
        invariants=("G1", "the ledger is whole"),
        seed=3,
    ),
    Bug(
        name="a group is archived without its last trajectory",
        module="services.broker.store.reader",
        old="members=[(row, self.chunks(row.trajectory_id)) for row in members]",
        new="members=[(row, self.chunks(row.trajectory_id)) for row in members[:-1]]",
        invariants=("G1", "the ledger is whole"),
        seed=3,
    ),
    Bug(
        name="a batch is archived that no checkpoint covers",
        module="services.broker.store.archivable",
        old="min(checkpointed, assembled - keep_batches)",
        new="assembled - keep_batches + 1",
        invariants=("retention",),
        seed=3,
    ),
    Bug(
        name="a commit leaves the mark as it is",
        module="services.broker.store.store",
        old="        self.newest = newest\n        self._write_mark()\n",
        new="        self.newest = newest\n",
        invariants=("damage is an event", "G1", "G2", "no process ends by itself", "no peer"),
        weather=_an_old_copy_is_put_back(),
    ),
    Bug(
        name="a broker starts with whatever is left",
        module="services.broker.store.inspection",
        old="    loss = inspect(ledger)\n    if loss:\n",
        new="    loss = inspect(ledger)\n    if False:\n",
        invariants=("damage is an event",),
        weather=_an_old_copy_is_put_back(),
    ),
    Bug(
        name="a row's checksum is not verified",
        module="services.broker.store.schema",
        old="if row_checksum(self.name, values) != checksum:",
        new="if False:",
        invariants=("damage is an event",),
        weather=tuple(Event(at=at, kind="damage", target=("broker",), seconds=0.3, amount=1.0) for at in (1.0, 5.0, 9.0)),
    ),
    Bug(
        name="a restore to an earlier batch keeps one batch too many",
        module="services.broker.store.rewind",
        old='            ("batches", "batch >= ?", next_batch),',
        new='            ("batches", "batch > ?", next_batch),',
        invariants=("restore",),
        weather=tuple(Event(at=at, kind="restore", seconds=1.0, amount=1.0) for at in (6.0, 12.0)),
    ),
    Bug(
        name="a restore to an earlier batch brings later checkpoints",
        module="services.runs.backup.restore",
        old='int(name.rpartition("-")[2]) > batch',
        new="False",
        invariants=("no process ends by itself", "no peer", "liveness", "restore", "no error"),
        weather=(Event(at=8.0, kind="restore", seconds=1.0, amount=1.0),),
        seed=7,
    ),
    Bug(
        name="a backup lacks the trajectories that are under way",
        module="services.broker.store.rewind",
        old='            run = replace(run, learner_peer="", learner_session="")',
        new='            run = replace(run, learner_peer="", learner_session="")\n'
        '            connection.execute("DELETE FROM chunks WHERE start > 0")',
        invariants=("restore",),
        weather=(Event(at=4.0, kind="restore", seconds=1.0),),
    ),
    Bug(
        name="a session's role is not compared",
        module="services.broker.ledger.fencing",
        old="if role != bound:",
        new="if False:",
        invariants=("a session keeps its role",),
        weather=HOSTILE,
    ),
    Bug(
        name="an operator's Goodbye ends the rollout of its name",
        module="services.broker.ledger.ledger",
        old='"gone", reason) if peer.role == "rollout" else []',
        new='"gone", reason)',
        invariants=("a session ends only itself",),
        weather=HOSTILE,
    ),
    Bug(
        name="a quota is never forgiven",
        module="services.broker.quotas.quotas",
        old="self.level - passed * quota.forgiven_per_s",
        new="self.level",
        invariants=("honest peers are not limited", "liveness"),
    ),
    Bug(
        name="nothing is held against a peer",
        module="services.broker.quotas.quotas",
        old="level.level += number",
        new="level.level += 0",
        invariants=("a liar is limited",),
        weather=HOSTILE,
    ),
    Bug(
        name="a token older than its lease is taken",
        module="services.broker.ledger.intake",
        old="if version < oldest:",
        new="if False:",
        invariants=("G3 nothing is dropped", "a liar is limited"),
        weather=HOSTILE,
    ),
    Bug(
        name="operators have no places of their own",
        module="services.broker.ledger.fencing",
        old="makes_room(self.of_role(role), self._taken[role], places, owner.key, now)",
        new="makes_room(self.of_role('rollout'), self._taken['rollout'], self._places['rollout'], owner.key, now)",
        invariants=("an operator always gets in",),
        weather=HOSTILE,
    ),
    Bug(
        name="a token outside the vocabulary is taken",
        module="services.broker.ledger.intake",
        old="if facts.largest_token_id >= newest.vocabulary:",
        new="if False:",
        invariants=("poison: a healthy batch", "no process ends by itself", "no error"),
        weather=_engines_lie(),
    ),
    Bug(
        name="a rollout does not check what an environment rewards",
        module="services.rollout.agent",
        old='            require_rewards("turn_rewards", [*trajectory.turn_rewards, value])\n',
        new="            pass\n",
        invariants=("no process ends by itself", "no error", "no peer"),
        weather=tuple(Event(at=at, kind="rewards_fail", seconds=8.0, amount=0.5) for at in (0.5, 10.0)),
    ),
    Bug(
        name="a lease never expires",
        module="services.broker.ledger.leases",
        old="self._deadlines.items() if deadline <= now]",
        new="self._deadlines.items() if deadline < 0]",
        invariants=("liveness",),
        seed=57,
    ),
)


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """Plant ``bug`` in the services inside this block. Raises: ValueError when its text is not there exactly once."""
    module = importlib.import_module(bug.module)
    source = inspect.getsource(module)
    if source.count(bug.old) != 1:
        raise ValueError(f"bug {bug.name!r}: {bug.module} has its text {source.count(bug.old)} times, expected once")
    before, after = (_codes(text, bug.module) for text in (source, source.replace(bug.old, bug.new)))
    with ExitStack() as stack:
        for name, function in _functions(module).items():
            if name in after and after[name] != before[name]:
                stack.callback(setattr, function, "__code__", function.__code__)
                function.__code__ = after[name]
        yield


def _codes(source: str, name: str) -> dict[str, types.CodeType]:
    """Code of every function and method, by qualified name, without line numbers."""
    found: dict[str, types.CodeType] = {}

    def collect(code: types.CodeType) -> None:
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                found[constant.co_qualname] = constant
                collect(constant)

    collect(compile(source, name, "exec", dont_inherit=True))
    return found


def _functions(module: types.ModuleType) -> dict[str, types.FunctionType]:
    found: dict[str, types.FunctionType] = {}
    owners: list[object] = [module, *(value for value in vars(module).values() if isinstance(value, type))]
    for owner in owners:
        for value in vars(owner).values():
            function = value.fget if isinstance(value, property) else value
            function = inspect.unwrap(function) if callable(function) else function
            if isinstance(function, types.FunctionType) and function.__module__ == module.__name__:
                found[function.__qualname__] = function
    return found
