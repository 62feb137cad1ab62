"""What happens to a lease: renewed, lost, handed back, taken over."""

from gspo_protocol.messages import Goodbye, Heartbeat, LeaseEnded, LeaseKey, LeaseRequest, Pulse, Refused, Release
from gspo_services.broker.ledger.actions import Action, GrantLease, Offence, SessionKey
from tests.support.broker.ledger import LedgerHarness, replies
from tests.support.broker.ledger_leases import R1, R2, harness, tokens_at
from tests.support.broker.peers import tokens_of


def test_the_lease_is_durable_before_it_is_sent() -> None:
    world = harness()
    (lease,) = world.lease(R1)
    row = world.restored().state.groups.trajectory(lease.trajectory_id)
    assert row is not None
    assert (row.epoch, row.holder_peer, row.status) == (lease.epoch, "r1", "leased")


def test_a_heartbeat_renews_exactly_the_leases_it_names() -> None:
    world = harness()
    first, second = world.lease(R1, capacity=2)
    world.tick(9.0)
    beat = Heartbeat(policy_version=1, status="serving", leases=[LeaseKey(first.trajectory_id, first.epoch)])
    actions = world.send(R1, beat)
    assert [pulse.policy_version for pulse in replies(actions, Pulse)] == [1]
    ended = replies(world.tick(2.0), LeaseEnded)
    assert [end.trajectory_id for end in ended] == [second.trajectory_id]


def test_time_in_which_the_broker_was_not_listening_ends_no_lease() -> None:
    world = harness()
    (lease,) = world.lease(R1)
    world.tick(4.0)
    world.now += 100.0
    assert replies(world.tick(), LeaseEnded) == []
    assert replies(world.tick(5.0), LeaseEnded) == []
    assert [end.trajectory_id for end in replies(world.tick(2.0), LeaseEnded)] == [lease.trajectory_id]


def renewed(world: LedgerHarness, lease: GrantLease, seconds: float) -> list[Action]:
    """Time passes while R1 renews the lease in each half of its time."""
    actions: list[Action] = []
    beat = Heartbeat(policy_version=1, status="serving", leases=[LeaseKey(lease.trajectory_id, lease.epoch)])
    for _ in range(int(seconds / 5)):
        actions += [*world.tick(5.0), *world.send(R1, beat)]
    return actions


def test_a_lease_that_is_renewed_without_a_token_ends_as_a_failed_attempt_and_others_go_on() -> None:
    """Otherwise a rollout that only says that it lives holds its group, and the next batch, for ever."""
    world = harness(idle_lease_s=60.0)
    (lease,) = world.lease(R1)
    world.grow(R1, lease, 4, 1)
    assert replies(renewed(world, lease, 55.0), LeaseEnded) == []
    actions = renewed(world, lease, 10.0)
    assert "no new token in 60 s (broker.idle_lease_s)" in replies(actions, LeaseEnded)[0].reason
    assert [(action.by, action.reason) for action in actions if isinstance(action, Offence)] == [(R1, "idle")]
    (again,) = world.lease(R2)
    assert (again.trajectory_id, again.epoch, again.num_tokens) == (lease.trajectory_id, 2, 4)
    row = world.ledger.state.groups.trajectory(lease.trajectory_id)
    assert row is not None
    assert row.attempts == 1
    assert replies(world.grow(R1, lease, 2, 1), LeaseEnded), "the former holder can no longer write"


def test_two_leases_of_a_group_that_are_idle_at_once_end_it_once() -> None:
    world = harness(idle_lease_s=60.0, max_attempts=1)
    held = [(sender, *world.lease(sender)) for sender in (R1, R2)]
    for _ in range(20):
        world.tick(4.0)
        for sender, lease in held:
            key = LeaseKey(lease.trajectory_id, lease.epoch)
            world.send(sender, Heartbeat(policy_version=1, status="serving", leases=[key]))
    assert [(line["event"], line["group_id"]) for line in world.lines] == [("dropped", held[0][1].group_id)]


def test_each_new_token_gives_a_lease_its_whole_time_again() -> None:
    world = harness(idle_lease_s=60.0)
    (lease,) = world.lease(R1)
    for num_tokens in (4, 1, 1):
        assert replies(renewed(world, lease, 50.0), LeaseEnded) == []
        world.grow(R1, lease, num_tokens, 1)
    world.grow(R1, lease, 1, 1, offset=5)  # What it sends again is nothing new.
    assert replies(renewed(world, lease, 65.0), LeaseEnded)


def test_time_in_which_the_broker_was_not_listening_makes_no_lease_idle() -> None:
    world = harness(idle_lease_s=60.0)
    (lease,) = world.lease(R1)
    world.now += 100.0
    assert replies(renewed(world, lease, 50.0), LeaseEnded) == []
    world.restart()
    world.hello(R1)
    assert replies(renewed(world, lease, 50.0), LeaseEnded) == []
    assert replies(renewed(world, lease, 15.0), LeaseEnded)


def test_a_heartbeat_that_names_a_lost_lease_is_answered_with_its_end() -> None:
    world = harness()
    (lease,) = world.lease(R1)
    world.tick(11.0)
    beat = Heartbeat(policy_version=1, status="serving", leases=[LeaseKey(lease.trajectory_id, lease.epoch)])
    assert [end.epoch for end in replies(world.send(R1, beat), LeaseEnded)] == [1]


def test_a_new_session_ends_the_leases_of_the_former_one_also_after_a_broker_restart() -> None:
    world = harness()
    (lease,) = world.lease(R1)
    world.grow(R1, lease, 4, 1)
    world.restart()
    reborn = SessionKey("r1", "b")
    world.hello(reborn)
    (again,) = world.lease(reborn)
    assert (again.trajectory_id, again.epoch, again.num_tokens) == (lease.trajectory_id, 2, 4)


def test_the_same_session_keeps_its_leases_over_a_broker_restart_with_a_fresh_deadline() -> None:
    world = harness()
    (lease,) = world.lease(R1)
    world.grow(R1, lease, 4, 1)
    world.now += 9.0
    world.restart()
    world.hello(R1)
    world.tick(9.0)
    assert replies(world.grow(R1, lease, 2, 1), LeaseEnded) == []
    assert tokens_at(world, lease.trajectory_id) == list(tokens_of(lease.trajectory_id, 6))
    world.tick(1.5)
    assert replies(world.grow(R1, lease, 2, 1), LeaseEnded) != []


def test_a_released_trajectory_resumes_elsewhere_without_a_failed_attempt() -> None:
    world = harness()
    (lease,) = world.lease(R1)
    world.grow(R1, lease, 4, 1)
    world.send(R1, Release(trajectory_id=lease.trajectory_id, epoch=lease.epoch, reason="drain", failed=False))
    (second,) = world.lease(R2)
    assert (second.trajectory_id, second.num_tokens, second.seed) == (lease.trajectory_id, 4, lease.seed)
    row = world.ledger.state.groups.trajectory(lease.trajectory_id)
    assert row is not None
    assert row.attempts == 0


def test_a_lease_that_could_not_be_sent_is_free_again() -> None:
    world = harness()
    (lease,) = world.lease(R1)
    world.ledger.on_undelivered(lease.trajectory_id, lease.epoch, "", world.now)
    assert [(grant.trajectory_id, grant.epoch) for grant in world.lease(R2)] == [(lease.trajectory_id, 2)]


def test_a_lease_that_can_never_be_sent_is_a_failed_attempt() -> None:
    world = harness()
    (lease,) = world.lease(R1)
    world.ledger.on_undelivered(lease.trajectory_id, lease.epoch, "the task is too large", world.now)
    row = world.ledger.state.groups.trajectory(lease.trajectory_id)
    assert row is not None
    assert (row.status, row.attempts) == ("free", 1)


def test_a_goodbye_ends_all_of_the_senders_leases_at_once() -> None:
    world = harness()
    lease, other = world.lease(R1, capacity=2)
    world.grow(R1, lease, 4, 1)
    (kept,) = world.lease(R2)
    world.send(R1, Goodbye(reason="drained"))
    assert [row.trajectory_id for row in world.ledger.state.groups.leased()] == [kept.trajectory_id]
    assert [again.trajectory_id for again in world.lease(R2, capacity=2)] == [lease.trajectory_id, other.trajectory_id]
    (refused,) = replies(world.send(R1, LeaseRequest(request_id=1, capacity=1, policy_version=1)), Refused)
    assert refused.reason.startswith("unknown session")
    assert world.hello(R1), "it may come back"


def test_leases_that_lapse_together_are_held_against_their_holder_once() -> None:
    world = harness(group_size=4)
    lost = world.lease(R1, capacity=3)
    actions = [*world.tick(9.0), *world.tick(2.0)]
    assert len(replies(actions, LeaseEnded)) == len(lost)
    assert [(each.by, each.reason) for each in offences(actions)] == [(R1, "expired")]


def test_a_new_session_that_ends_unused_leases_is_held_against_its_peer_once() -> None:
    """Otherwise a peer could take leases again and again, and work on none."""
    world = harness(group_size=4)
    used, *_ = world.lease(R1, capacity=3)
    world.grow(R1, used, 2, 1)
    actions = world.hello(SessionKey("r1", "b"))
    assert [(each.by.peer, each.reason) for each in offences(actions)] == [("r1", "expired")]
    (lease,) = world.lease(SessionKey("r1", "b"))
    world.grow(SessionKey("r1", "b"), lease, 2, 1)
    assert offences(world.hello(SessionKey("r1", "c"))) == [], "its work was not for nothing"


def offences(actions: list[Action]) -> list[Offence]:
    return [action for action in actions if isinstance(action, Offence)]
