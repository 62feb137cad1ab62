"""Many chunks in one message: the same effect as one by one; what is wrong with one costs the others nothing."""

import random
import re
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from gspo_protocol.messages import Ack, Chunk, LeaseEnded, Refused, Release, Segment, VersionRun
from gspo_services.broker.ledger.actions import GrantLease, Save, SessionKey
from gspo_services.broker.store import RowChanges
from tests.support.broker.ledger import LEARNER, LedgerHarness, chunk, config_with, replies
from tests.support.broker.peers import VOCABULARY

A = SessionKey("rollout-a", "s")
B = SessionKey("rollout-b", "s")


def a_world(**changes: Any) -> tuple[LedgerHarness, list[GrantLease]]:
    """Two rollouts serve; A has four leases. ``changes``: of the rules."""
    world = LedgerHarness(config_with(group_size=4, **changes))
    world.hello(LEARNER, "learner")
    world.publish(1, 0)
    world.hello(A)
    world.hello(B)
    return world, world.lease(A, 4)


def lengths(world: LedgerHarness, leases: list[GrantLease]) -> list[tuple[int, int]]:
    """Tokens of each trajectory in memory, and on disk."""
    rows = [world.ledger.state.groups.trajectory(lease.trajectory_id) for lease in leases]
    return [(row.num_tokens, world.store.payload(row.trajectory_id).num_tokens) for row in rows if row is not None]


def more(lease: GrantLease, offset: int, num_tokens: int) -> Chunk:
    """A chunk; after the first, one that does not change the state."""
    made = chunk(lease, offset, num_tokens, 1)
    return made if offset == 0 else replace(made, state=None)


def test_many_chunks_have_the_effect_of_each_and_one_acknowledgement() -> None:
    rng = random.Random(3)
    together, leases = a_world()
    single, _ = a_world()
    ends = dict.fromkeys(range(4), 0)
    for _ in range(12):
        sent = []
        for _ in range(rng.randint(1, 6)):
            number = rng.randrange(4)
            size = rng.randint(2, 4)
            if ends[number] + size <= 60:
                sent.append(more(leases[number], ends[number], size))
                ends[number] += size
        if not sent:
            continue
        assert replies(together.send_chunks(A, sent), Ack)[0].next_seq > 0
        for each in sent:
            single.send(A, each)
    assert together.store.contents().trajectories == single.store.contents().trajectories
    assert together.restored().state.groups.leased() == together.ledger.state.groups.leased()
    for lease in leases:
        assert _whole(together, lease) == _whole(single, lease)
    assert sum(ends.values()) > 100


def _whole(world: LedgerHarness, lease: GrantLease) -> list[object]:
    payload = world.store.payload(lease.trajectory_id)
    tokens = (payload.token_ids.tolist(), payload.logprobs.tolist())
    return [tokens, payload.segments, payload.version_runs, payload.state, payload.turn_done, payload.turn_rewards]


def test_chunks_of_one_trajectory_that_follow_one_another_are_one_row_on_the_disk() -> None:
    world, leases = a_world()
    one, two = leases[:2]
    world.send_chunks(A, [more(one, 0, 4), more(two, 0, 2)])
    answers = world.send_chunks(
        A, [more(one, 4, 3), more(two, 2, 1), more(one, 7, 2), replace(more(one, 9, 5), turn_done=True)]
    )
    assert replies(answers, Refused) == []
    assert lengths(world, [one, two]) == [(14, 14), (3, 3)]
    assert [each.num_tokens for each in world.store.chunks(one.trajectory_id)] == [4, 10]
    assert world.store.payload(one.trajectory_id).turn_done


def test_versions_that_change_within_a_stretch_count_as_they_do_one_by_one() -> None:
    together, leases = a_world()
    single, _ = a_world()
    versions = [1, 1, 2, 2]
    sent = [replace(chunk(leases[0], 3 * number, 3, version), state={}) for number, version in enumerate(versions)]
    for world in (together, single):
        world.publish(2, 0)
        world.send(A, sent[0])
    together.send_chunks(A, sent[1:])
    for each in sent[1:]:
        single.send(A, each)
    assert len(together.store.chunks(leases[0].trajectory_id)) == 2
    assert together.store.contents().trajectories == single.store.contents().trajectories
    assert _whole(together, leases[0]) == _whole(single, leases[0])


def test_a_row_is_behind_its_chunks_by_no_more_than_a_start_reads_again() -> None:
    world, leases = a_world()
    (lease,) = leases[:1]
    stored = f"SELECT num_tokens FROM trajectories WHERE trajectory_id = {lease.trajectory_id}"
    world.send_chunks(A, [more(lease, 0, 2)])
    on_disk = []
    for offset in range(2, 42):
        world.send_chunks(A, [more(lease, offset, 1)])
        on_disk.append(world.store.number(stored))
    assert on_disk == [2] * 15 + [18] * 16 + [34] * 9
    now = world.ledger.state.groups.leased()
    assert now[0].num_tokens == now[0].num_action_tokens + 1 == 42
    assert world.restored().state.groups.leased() == now


def test_what_writes_a_row_writes_it_with_the_chunks_that_it_was_behind() -> None:
    world, leases = a_world()
    sent = [[more(lease, 0, 2)] for lease in leases] + [[more(lease, 2, 3)] for lease in leases]
    for each in sent:
        world.send_chunks(A, each)
    stored = "SELECT num_tokens FROM trajectories WHERE trajectory_id = {}"
    released, dropped = leases[0].trajectory_id, leases[1].trajectory_id
    assert [world.store.number(stored.format(each)) for each in (released, dropped)] == [2, 2]
    world.send(A, Release(trajectory_id=released, epoch=1, failed=False, reason="drained"))
    assert world.store.number(stored.format(released)) == 5
    for action in world.ledger.state.drop_group(leases[0].group_id, "stale"):
        if isinstance(action, Save):
            world.store.commit(RowChanges(rows=[action.row]))
    assert world.store.number(stored.format(dropped)) == 5


def test_a_failure_that_drops_its_group_writes_the_rows_that_were_behind_its_own_too() -> None:
    world, leases = a_world(max_attempts=1)
    for lease in leases:
        world.send_chunks(A, [more(lease, 0, 2)])
        world.send_chunks(A, [more(lease, 2, 3)])
    world.fail(A, leases[0])
    stored = "SELECT num_tokens FROM trajectories WHERE trajectory_id = {}"
    assert [world.store.number(stored.format(lease.trajectory_id)) for lease in leases] == [5, 5, 5, 5]


def test_the_chunk_of_a_stretch_that_is_too_much_is_refused_alone() -> None:
    world, leases = a_world()
    one, two = leases[:2]
    world.send_chunks(A, [more(one, 0, 4), more(two, 0, 4)])
    (most,) = {lease.sampling.max_tokens for lease in (one, two)}
    sizes = [10, most - 20, 6, 1]
    following = [more(one, 4 + sum(sizes[:number]), size) for number, size in enumerate(sizes)]
    answers = world.send_chunks(A, [*following, more(two, 4, 3)])
    (refused,) = replies(answers, Refused)
    assert f"chunks[3]: {most + 1} tokens, {most} allowed" in refused.reason
    assert lengths(world, [one, two]) == [(most, most), (7, 7)]


def test_a_stretch_of_which_the_first_chunks_are_stored_goes_on_with_the_others() -> None:
    world, leases = a_world()
    sent = [more(leases[0], 0, 4), more(leases[0], 4, 3), more(leases[0], 7, 2), more(leases[0], 9, 1)]
    world.send_chunks(A, sent[:2])
    world.restart()
    world.hello(A)
    assert replies(world.send_chunks(A, sent), Refused) == []
    assert lengths(world, leases[:1]) == [(10, 10)]


def test_a_chunk_that_comes_twice_in_a_message_is_stored_once() -> None:
    world, leases = a_world()
    first, second = more(leases[0], 0, 4), more(leases[0], 4, 3)
    assert replies(world.send_chunks(A, [first, first, second, second, first]), Refused) == []
    assert lengths(world, leases[:1]) == [(7, 7)]
    world.restart()
    world.hello(A)
    world.send_chunks(A, [first, second, more(leases[0], 7, 2)])
    assert lengths(world, leases[:1]) == [(9, 9)]


def test_a_chunk_of_anothers_lease_ends_nothing_of_the_others() -> None:
    world, leases = a_world()
    foreign = world.lease(B, 1)[0]
    answers = world.send_chunks(A, [more(leases[0], 0, 4), more(foreign, 0, 4), more(foreign, 4, 2), more(leases[1], 0, 3)])
    assert [(each.trajectory_id, each.epoch) for each in replies(answers, LeaseEnded)] == [(foreign.trajectory_id, 1)]
    assert lengths(world, [leases[0], foreign, leases[1]]) == [(4, 4), (0, 0), (3, 3)]
    assert replies(answers, Ack) != []


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"offset": 9}, "gap: offset is 9, 4 tokens are acknowledged"),
        ({"version_runs": [VersionRun(2, 3)]}, "version_runs give version 2 to action tokens"),
        ({"segments": [Segment("action", 1, 3)]}, "0 turn_rewards for 1 turns that the chunk completes"),
        ({"turn_rewards": [1.0]}, "1 turn_rewards for 0 turns"),
    ],
)
def test_a_bad_chunk_is_named_by_its_place_and_costs_the_others_nothing(bad, reason) -> None:
    world, leases = a_world()
    wrong = replace(more(leases[0], 4, 3), **bad)
    sent = [more(leases[0], 0, 4), more(leases[1], 0, 3), wrong, more(leases[0], 4, 2), more(leases[2], 0, 5)]
    answers = world.send_chunks(A, sent)
    (refused,) = replies(answers, Refused)
    assert refused.reason.startswith(f"trajectory {leases[0].trajectory_id}: chunks[2]: ")
    assert refused.message_type == "chunks"
    assert [each.trajectory_id for each in replies(answers, LeaseEnded)] == [leases[0].trajectory_id]
    assert re.search(reason, refused.reason)
    assert lengths(world, leases[:3]) == [(4, 4), (3, 3), (5, 5)]
    assert world.store.contents().trajectories == tuple(
        row for group in world.store.contents().groups for row in world.ledger.state.groups.members(group.group_id)
    )
    assert world.ledger.state.groups.trajectory(leases[0].trajectory_id).status == "free"


def test_a_token_outside_of_the_vocabulary_is_the_fault_of_one_chunk() -> None:
    world, leases = a_world()
    sent = [more(lease, 0, 4) for lease in leases[:2]]
    world.send_chunks(A, sent)
    following = [more(lease, 4, 2) for lease in leases[:2]]
    answers = world.send_chunks(A, following, token_ids=np.array([1, 2, 3, VOCABULARY], np.int32))
    assert "the model's vocabulary has" in replies(answers, Refused)[0].reason
    assert "chunks[1]" in replies(answers, Refused)[0].reason
    assert lengths(world, leases[:2]) == [(6, 6), (4, 4)]


def test_a_message_that_comes_again_changes_nothing() -> None:
    world, leases = a_world()
    sent = [more(leases[0], 0, 4), more(leases[1], 0, 3)]
    world.send_chunks(A, sent, seq=0)
    before = world.store.newest.chunks
    assert replies(world.send_chunks(A, sent, seq=0), Ack)[0].next_seq == 1
    assert world.store.newest.chunks == before == 2
