"""Bugs in delivery, leases and admission."""

from tests.simulation.audit.lines import LINES
from tests.simulation.bugs.planting import Bug
from tests.simulation.plan import Event


def _one_rollout_keeps_old_weights() -> tuple[Event, ...]:
    """One rollout keeps old weights and gets trajectories that another began."""
    events = [Event(at=0.0, kind="join", target=("rollout-late",))]
    for at in (1.0, 8.0, 15.0):
        events.append(Event(at=at, kind="partition", target=("rollout-0", "learner"), seconds=6.0))
        events.append(Event(at=at + 4.0, kind="kill", target=("rollout-late",), seconds=0.5))
    return tuple(events)


def _the_broker_dies_after_its_commits() -> tuple[Event, ...]:
    """The broker dies after a commit, before it acknowledges: rollouts send again what is stored."""
    moments = (1.0, 3.0, 5.0, 8.0, 11.0, 14.0)
    return tuple(Event(at=at, kind="kill_when", target=("broker",), seconds=0.5, point="committed") for at in moments)


def _the_disk_is_full() -> tuple[Event, ...]:
    """Again and again, for less than a lease."""
    return tuple(Event(at=at, kind="disk_full", target=("broker",), seconds=0.7) for at in (1.0, 3.0, 5.0, 8.0, 11.0, 14.0))


def _a_rollout_sleeps_as_long_as_a_lease() -> tuple[Event, ...]:
    """A rollout sleeps as long as a lease, and the rollout that gets its trajectories is slow."""
    events = [
        Event(at=0.0, kind="join", target=("rollout-late",)),
        Event(at=0.5, kind="slow", target=("rollout-late",), seconds=30.0, amount=2.0),
    ]
    for at, seconds in ((1.0, 4.5), (7.0, 8.7), (17.0, 5.5), (24.0, 9.5)):
        events.append(Event(at=at, kind="suspend", target=("rollout-0",), seconds=seconds))
    return tuple(events)


def _rollouts_die_again_and_again() -> tuple[Event, ...]:
    """Some of them between a reward and the next token."""
    return tuple(Event(at=0.5 * at, kind="kill", target=(f"rollout-{at % 2}",)) for at in range(2, 50))


DELIVERY = (
    Bug(
        name="acknowledge before the commit",
        module="gspo_services.broker.service",
        old="            is_last, changes = round_.is_last, round_.changes\n",
        new="            is_last, changes = round_.is_last, round_.changes\n"
        "            await self._carry_out(round_.effects)\n"
        "            round_.effects.clear()\n",
        invariants=("G1", "G2"),
    ),
    Bug(
        name="what is decided ahead is answered with the round before it",
        module="gspo_services.broker.service",
        old="            await self._carry_out(round_.effects)\n",
        new="            await self._carry_out([*round_.effects, *self._next.open.effects])\n"
        "            self._next.open.effects.clear()\n",
        invariants=("G1", "G2"),
        seed=1,
    ),
    Bug(
        name="what was decided meanwhile is lost when the disk refuses",
        module="gspo_services.broker.rounds",
        old="        self._held = True\n",
        new="        self._held, self.open = True, DecidedRound(effects=self.open.effects)\n",
        invariants=("G1", "G2", "no process ends by itself"),
        weather=_the_disk_is_full(),
    ),
    Bug(
        name="a refused commit is decided twice",
        module="gspo_services.broker.rounds",
        old="                self._next_round.refused()\n",
        new="                self._next_round.refused()\n"
        "                self._next_round.open.changes.chunks[:0] = changes.chunks\n"
        "                self._next_round.open.changes.rows[:0] = changes.rows\n",
        invariants=("G1", "G2", "versions grow", "no process ends by itself"),
        weather=_the_disk_is_full(),
    ),
    Bug(
        name="a lease's epoch is not checked",
        module="gspo_services.broker.ledger.leases.leases",
        old='row.status != "leased" or row.epoch != epoch:\n            return None\n        return row if sender',
        new='row.status != "leased":\n            return None\n        return row if sender or sender',
        invariants=("G1",),
        weather=_a_rollout_sleeps_as_long_as_a_lease(),
        seed=68,
    ),
    Bug(
        name="a lease does not raise the epoch",
        module="gspo_services.broker.ledger.group_states",
        old="epoch=row.epoch + 1,",
        new="epoch=max(row.epoch, 1),",
        invariants=("G1",),
        seed=3,
    ),
    Bug(
        name="a chunk may overlap what is stored",
        module="gspo_services.broker.ledger.leases.holders",
        old="        if row.lease_start <= offset and offset + num_tokens <= row.num_tokens:\n"
        "            return []  # delivered again after a broker restart\n"
        "        if offset != row.num_tokens:",
        new="        if offset > row.num_tokens:",
        invariants=("G1", "no process ends by itself"),
        weather=_the_broker_dies_after_its_commits(),
        seed=4,
    ),
    Bug(
        name="the second of many chunks is lost",
        module="gspo_services.broker.store.payload",
        old="    for stretch in stretches:\n",
        new="    for stretch in (*stretches[:1], *stretches[2:]):\n",
        invariants=("G1", "poison", "no process ends by itself", "the ledger is whole"),
        seed=2,
    ),
    Bug(
        name="chunks that follow one another are stored in another order",
        module="gspo_services.broker.store.payload",
        old="[each[at] for at in places]",
        new="[each[at] for at in reversed(places)]",
        invariants=("G1", "G2", "G4", "the ledger is whole"),
        seed=27,
    ),
    Bug(
        name="an acknowledgement covers a chunk that was not committed",
        module="gspo_services.broker.ledger.leases.holders",
        old="        together = list(compress(chunks.stretches, is_taken))\n",
        new="        together = [\n"
        "            each for each in compress(chunks.stretches, is_taken) if each.places[-1] + 1 < len(chunks)\n"
        "        ]\n",
        invariants=("G1",),
        seed=2,
    ),
    Bug(
        name="a message after a gap is accepted",
        module="gspo_protocol.delivery",
        old="        if seq != self._expected:\n            return False\n        self._expected += 1",
        new="        if seq < self._expected:\n            return False\n        self._expected = seq + 1",
        invariants=("G1", "liveness", "no peer"),
        weather=(Event(at=1.0, kind="loss", seconds=12.0, amount=0.2),),
    ),
    Bug(
        name="the window of unacknowledged messages is unlimited",
        module="gspo_protocol.delivery",
        old="return len(self._unacked) < self._window and self._num_bytes < self._window_bytes",
        new="return True",
        invariants=("G6",),
        seed=2,
    ),
    Bug(
        name="a connection that answers nothing is kept",
        module="gspo_services.shared.net.peer",
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
        module="gspo_services.broker.store.reader",
        old="return join(rows)",
        new="return join(rows[:-1])",
        invariants=("G1", "poison", "no process ends by itself"),
        seed=3,
    ),
    Bug(
        name="admission ignores the oldest version of a group under way",
        module="gspo_services.broker.ledger.leases.leases",
        old="return window.extend(",
        new="return True or (",
        invariants=("G3", "G4"),
        weather=_one_rollout_keeps_old_weights(),
        seed=41,
    ),
    Bug(
        name="a batch may filter out groups that must not get older",
        module="gspo_services.broker.ledger.admission",
        old="if is_last_of_version and num_left > allowed:",
        new="if False:",
        invariants=("G3",),
        seed=51,
    ),
    Bug(
        name="groups that are too old are trained",
        module="gspo_services.broker.ledger.admission",
        old="return max(1, version - self.max_lag)",
        new="return 1",
        invariants=("G3", "G4", "no process ends by itself"),
        seed=11,
    ),
    Bug(
        name="a prompt is skipped",
        module="gspo_services.broker.ledger.state",
        old="self.next_prompt += 1",
        new="self.next_prompt += 2",
        invariants=("G2 no prompt",),
    ),
    Bug(
        name="a group is forgotten with the broker's memory",
        module="gspo_services.broker.ledger.state",
        old="return group.group_id, [Save(row=group), *saves(self.groups.members(group.group_id)), *passed_over]",
        new="return group.group_id, [*saves(self.groups.members(group.group_id)), *passed_over]",
        invariants=("G2", "no error", "no process"),
    ),
    Bug(
        name="a batch is delivered again in another order",
        module="gspo_services.broker.sending.batches",
        old='for trajectory in reader.rows(TrajectoryRow, "WHERE group_id = ? ORDER BY trajectory_id"',
        new='for trajectory in reader.rows(TrajectoryRow, "WHERE group_id = ? ORDER BY '
        '(trajectory_id * 7919 + (SELECT count(*) FROM trained)) % 13"',
        invariants=("G2",),
        seed=1,
    ),
    Bug(
        name="an episode is resumed with its first state",
        module="gspo_services.broker.store.payload",
        old="state = state if header.state is None else header.state",
        new="state = header.state if state is None else state",
        invariants=("G2 an episode",),
        seed=25,
    ),
    Bug(
        name="an unacknowledged message is never sent again",
        module="gspo_protocol.delivery",
        old="        if not self._unacked or now - self._last_progress < self._pause_s:\n            return ()\n",
        new="        if True:\n            return ()\n",
        invariants=("liveness", "honest peers are not limited"),
        seed=3,
        weather=(Event(at=0.0, kind="loss", seconds=40.0, amount=0.15),),
    ),
    Bug(
        name="processes of one name share a connection",
        module="gspo_protocol.sessions",
        old='return f"{peer}/{session}#{number}" if number else f"{peer}/{session}"',
        new="return peer",
        invariants=("one learner", "liveness", "G1", "no peer", "no error is lost"),
        weather=(Event(at=2.0, kind="second_rollout", target=("rollout-0",)),),
    ),
    Bug(
        name="a lease comes without the journal",
        module="gspo_services.broker.store.reader",
        old="return self.payload(trajectory_id), self.journal(trajectory_id)",
        new="return self.payload(trajectory_id), []",
        invariants=("G1 nothing acknowledged is lost",),
        seed=18,
    ),
    Bug(
        name="a turn that is graded again counts twice",
        module="gspo_services.rollout.trajectory",
        old='self._components[entry["turn"]] = entry["components"]',
        new='self._components[self._num_entries] = entry["components"]',
        invariants=("G2 an episode",),
        weather=_rollouts_die_again_and_again(),
        seed=10,
    ),
    Bug(
        name="an entry of the journal is not durable",
        module="gspo_services.broker.ledger.leases.holders",
        old="len(entry.entry))), Save(row=entry)]",
        new="len(entry.entry)))]",
        invariants=("G1 nothing acknowledged is lost",),
        seed=1,
    ),
    Bug(
        name="a lease never expires",
        module="gspo_services.broker.ledger.leases.leases",
        old="self._leased(self._deadlines.past(now))",
        new="self._leased([])",
        invariants=("liveness",),
        seed=16,
    ),
    Bug(
        name="a line of metrics counts the tokens of one group",
        module="gspo_services.broker.ledger.training",
        old="        report = {} if batch is None else batch_report(batch)\n",
        new="        report = {} if batch is None else {**batch_report(batch), 'num_tokens': 1}\n",
        invariants=(LINES,),
    ),
)
