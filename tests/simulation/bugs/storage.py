"""Bugs in the ledger, its archive, damage and restores."""

from tests.simulation.bugs.planting import Bug
from tests.simulation.plan import Event
from tests.simulation.weather import LOSS_AMOUNT


def _an_old_copy_is_put_back() -> tuple[Event, ...]:
    """Copies of half a second ago, so that mostly nothing but the mark knows of what is lost."""
    return tuple(Event(at=at, kind="damage", target=("broker",), seconds=0.5) for at in (1.0, 5.0, 9.0, 14.0))


def _a_loss_is_accepted() -> tuple[Event, ...]:
    """A person goes on from a copy of two seconds ago."""
    return tuple(Event(at=at, kind="damage", target=("broker",), seconds=2.0, amount=LOSS_AMOUNT) for at in (1.0, 6.0, 11.0))


STORAGE = (
    Bug(
        name="tokens leave the ledger before their file is there",
        module="gspo_services.broker.retention",
        old="            await self._in_thread(lambda: writer.publish(row))\n"
        "            await commit(RowChanges(rows=[row, *archived]))\n",
        new="            await commit(RowChanges(rows=[row, *archived]))\n"
        "            await self._in_thread(lambda: writer.publish(row))\n",
        invariants=("G1", "the ledger is whole"),
        seed=3,
    ),
    Bug(
        name="a group is archived without its last trajectory",
        module="gspo_services.broker.store.reader",
        old="members=[(row, self.chunks(row.trajectory_id)) for row in members]",
        new="members=[(row, self.chunks(row.trajectory_id)) for row in members[:-1]]",
        invariants=("G1", "the ledger is whole"),
        seed=3,
    ),
    Bug(
        name="a batch is archived that no checkpoint covers",
        module="gspo_services.broker.store.archivable",
        old="min(checkpointed, assembled - keep_batches)",
        new="assembled - keep_batches + 1",
        invariants=("retention",),
        seed=3,
    ),
    Bug(
        name="a commit leaves the mark as it is",
        module="gspo_services.broker.store.store",
        old="        self.newest = commit\n        self._write_mark()\n",
        new="        self.newest = commit\n",
        invariants=("damage is an event", "G1", "G2", "no process ends by itself", "no peer"),
        weather=_an_old_copy_is_put_back(),
        seed=5,
    ),
    Bug(
        name="a broker starts with whatever is left",
        module="gspo_services.broker.store.inspection",
        old="    loss = inspect(ledger)\n    if loss:\n",
        new="    loss = inspect(ledger)\n    if False:\n",
        invariants=("damage is an event",),
        weather=_an_old_copy_is_put_back(),
        seed=1,
    ),
    Bug(
        name="an accepted loss uses the lost commits' numbers again",
        module="gspo_services.broker.store.acceptance",
        old="max(newest.number, 0 if mark is None else mark.commit.number) + 1",
        new="newest.number + 1",
        invariants=("damage is an event", "no process ends by itself"),
        weather=_a_loss_is_accepted(),
    ),
    Bug(
        name="checkpoints of a lost past stay after an accepted loss",
        module="gspo_services.broker.store.acceptance",
        old="position is not None and position > trained",
        new="False",
        invariants=("the ledger is whole", "damage is an event", "no process ends by itself", "liveness", "G2"),
        weather=_a_loss_is_accepted(),
        seed=7,
    ),
    Bug(
        name="an accepted loss is not recorded",
        module="gspo_services.broker.store.acceptance",
        old='connection.execute("INSERT INTO losses (loss, line, checksum) VALUES (?, ?, ?)", (number, line, checksum))',
        new="pass",
        invariants=("the ledger is whole",),
        weather=_a_loss_is_accepted(),
    ),
    Bug(
        name="a row's checksum is not verified",
        module="gspo_services.broker.store.schema",
        old="if row_checksum(self.name, values) != checksum:",
        new="if False:",
        invariants=("damage is an event",),
        weather=tuple(Event(at=at, kind="damage", target=("broker",), seconds=0.3, amount=1.0) for at in (1.0, 5.0, 9.0)),
        seed=1,
    ),
    Bug(
        name="a restore to an earlier batch keeps one batch too many",
        module="gspo_services.broker.store.rewind",
        old='            ("batches", "batch >= ?", next_batch),',
        new='            ("batches", "batch > ?", next_batch),',
        invariants=("restore",),
        weather=tuple(Event(at=at, kind="restore", seconds=1.0, amount=1.0) for at in (6.0, 12.0)),
        seed=1,
    ),
    Bug(
        name="a restore to an earlier batch brings later checkpoints",
        module="gspo_services.runs.backup.restore",
        old="if batch is None or not is_newer(name, batch)",
        new="",
        invariants=("no process ends by itself", "no peer", "liveness", "restore", "no error"),
        weather=(Event(at=8.0, kind="restore", seconds=1.0, amount=1.0),),
        seed=7,
    ),
    Bug(
        name="a backup lacks the trajectories that are under way",
        module="gspo_services.broker.store.rewind",
        old='            run = replace(run, learner_peer="", learner_session="")',
        new='            run = replace(run, learner_peer="", learner_session="")\n'
        '            connection.execute("DELETE FROM chunks WHERE start > 0")',
        invariants=("restore",),
        weather=(Event(at=4.0, kind="restore", seconds=1.0),),
    ),
)
