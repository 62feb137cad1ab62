"""An episode's journal: entries are durable, come once and in order, and go to whoever continues the episode."""

from typing import Any

import pytest

from gspo_protocol.limits import MAX_ENTRIES, MAX_JOURNAL_BYTES
from gspo_protocol.messages import Journal, LeaseEnded, Refused
from gspo_protocol.messages.journal import pack_entry
from gspo_services.broker.ledger.actions import GrantLease
from gspo_services.broker.ledger.intake import journal_entry
from gspo_services.broker.rows import ArchivedRow, JournalRow, TrajectoryRow
from gspo_services.broker.store.reader import StoreCorrupt
from gspo_services.broker.store.store import RowChanges
from tests.support.broker.ledger import CONFIG, LedgerHarness, replies
from tests.support.broker.ledger_leases import R1, R2, harness


def an_entry(lease: GrantLease, place: int, entry: Any = None) -> Journal:
    return Journal(trajectory_id=lease.trajectory_id, epoch=lease.epoch, place=place, entry=entry or {"result": place})


def kept(world: LedgerHarness, lease: GrantLease) -> list[bytes]:
    return world.store.journal(lease.trajectory_id)


def test_entries_go_to_whoever_continues_and_are_taken_once() -> None:
    world = harness()
    (lease,) = world.lease(R1, 1)
    world.send(R1, an_entry(lease, 0))
    world.send(R1, an_entry(lease, 1))
    assert not world.send(R1, an_entry(lease, 1, {"other": 1}))[:-1]  # again after a reconnection: only acknowledged
    world.grow(R1, lease, 3, 1)
    world.tick(CONFIG.lease_s + 1)
    (again,) = [grant for grant in world.lease(R2, 1) if grant.trajectory_id == lease.trajectory_id]
    assert (again.num_tokens, again.num_entries) == (3, 2)
    assert kept(world, again) == [pack_entry({"result": 0}), pack_entry({"result": 1})]
    world.send(R2, an_entry(again, 2))
    (ended,) = replies(world.send(R1, an_entry(lease, 2)), LeaseEnded)
    assert ended.reason == "not held by this session"
    assert len(kept(world, again)) == 3
    restored = world.restored()
    row = restored.state.groups.trajectory(lease.trajectory_id)
    assert row is not None
    assert (row.num_entries, row.journal_bytes) == (3, sum(map(len, kept(world, again))))


def test_a_gap_is_a_failed_attempt() -> None:
    world = harness()
    (lease,) = world.lease(R1, 1)
    actions = world.send(R1, an_entry(lease, 1))
    (refused,) = replies(actions, Refused)
    assert "gap: place is 1, 0 entries are acknowledged" in refused.reason
    assert replies(actions, LeaseEnded)
    assert kept(world, lease) == []


@pytest.mark.parametrize("writes", [False, True])
def test_an_entry_keeps_a_lease_from_being_idle(writes: bool) -> None:
    world = harness(idle_lease_s=5.0)
    (lease,) = world.lease(R1, 1)
    world.tick(4.0)
    if writes:
        world.send(R1, an_entry(lease, 0))
    world.tick(4.0)
    row = world.ledger.state.groups.trajectory(lease.trajectory_id)
    assert row is not None
    assert (row.status == "leased") == writes


@pytest.mark.parametrize(
    ("fields", "size", "reason"),
    [
        ({"num_entries": MAX_ENTRIES}, 1, r"16385 entries, 16384 allowed \(MAX_ENTRIES\)"),
        ({"journal_bytes": MAX_JOURNAL_BYTES - 4}, 8, r"bytes, 8388608 allowed \(MAX_JOURNAL_BYTES\)"),
    ],
)
def test_a_journal_has_limits(fields: dict[str, int], size: int, reason: str) -> None:
    row = TrajectoryRow(trajectory_id=1, group_id=1, status="leased", epoch=1, **fields)
    with pytest.raises(ValueError, match=reason):
        journal_entry(row, Journal(trajectory_id=1, epoch=1, place=row.num_entries, entry={"x": "y" * size}))


def test_a_journal_leaves_the_ledger_with_its_group_and_one_that_lacks_an_entry_is_damage() -> None:
    world = harness()
    (lease,) = world.lease(R1, 1)
    for place in range(3):
        world.send(R1, an_entry(lease, place))
    world.store._connection.execute("DELETE FROM journal WHERE place = 1")
    with pytest.raises(StoreCorrupt, match=f"the journal of trajectory {lease.trajectory_id} lacks entries"):
        kept(world, lease)
    world.store.commit(RowChanges(rows=[ArchivedRow(group_id=lease.group_id, archive=1, place=0)]))
    assert world.store.rows(JournalRow, "") == []
