"""Policy versions: each is published once, and makes others too old."""

import msgspec

from gspo_protocol.messages import LeaseEnded, Published, Pulse, Refused
from gspo_services.broker.ledger.actions import Announce, Save
from tests.support.broker.ledger import LEARNER, chunk, delivered, granted, replies
from tests.support.broker.ledger_training import R1, generate, group_ids, harness, train_one
from tests.support.broker.peers import VOCABULARY


def test_a_publication_is_a_hint_to_every_rollout() -> None:
    world = harness()
    (hint,) = [action for action in world.publish(2, 0) if isinstance(action, Announce)]
    assert isinstance(hint.message, Pulse)
    assert (hint.message.policy_version, hint.message.weights_endpoint) == (2, "tcp://w:1")


def test_a_version_is_never_reused_but_may_be_delivered_again() -> None:
    world = harness()
    world.publish(2, 0)
    world.restart()
    world.hello(LEARNER, "learner")
    assert replies(world.publish(1, 0), Refused) == []
    assert replies(world.publish(2, 0), Refused) == []
    other = Published(
        policy_version=2, endpoint="tcp://w:1", digest="other", num_bytes=1, trained_batches=0, vocabulary=VOCABULARY
    )
    (refused,) = replies(world.send(LEARNER, other), Refused)
    assert refused.fatal
    assert "versions are never reused; publish 3" in refused.reason
    assert world.ledger.state.batches.newest_version == 2


def test_the_newest_version_may_be_published_again_from_another_place() -> None:
    """A learner that restarts has the same weights and another endpoint."""
    world = harness()
    world.publish(2, 0)
    lines = len(world.lines)
    moved = Published(
        policy_version=2, endpoint="tcp://new:1", digest="d-2", num_bytes=1, trained_batches=0, vocabulary=VOCABULARY
    )
    (hint,) = [action for action in world.send(LEARNER, moved) if isinstance(action, Announce)]
    assert isinstance(hint.message, Pulse)
    assert (hint.message.policy_version, hint.message.weights_endpoint) == (2, "tcp://new:1")
    world.restart()
    newest = world.ledger.state.batches.newest
    assert newest is not None
    assert newest.endpoint == "tcp://new:1"
    assert len(world.lines) == lines
    world.hello(LEARNER, "learner")
    older = msgspec.structs.replace(moved, policy_version=1)
    (refused,) = replies(world.send(LEARNER, older), Refused)
    assert "versions are never reused" in refused.reason


def test_a_version_nobody_could_fetch_is_refused_and_reaches_no_rollout() -> None:
    world = harness()
    for version in (2, 1):  # A new one, and the newest again from another place.
        nowhere = Published(
            policy_version=version, endpoint="tcp://w", digest="d-2", num_bytes=1, trained_batches=0, vocabulary=VOCABULARY
        )
        actions = world.send(LEARNER, nowhere)
        (refused,) = replies(actions, Refused)
        assert refused.fatal
        assert refused.reason.startswith("published: endpoint is 'tcp://w': expected tcp://HOST:PORT")
        assert not any(isinstance(action, Announce | Save) for action in actions)
    newest = world.ledger.state.batches.newest
    assert newest is not None
    assert (newest.policy_version, newest.endpoint) == (1, "tcp://w:1")


def test_a_version_jump_drops_what_became_too_old_and_records_its_lengths() -> None:
    world = harness(max_lag=1, num_batches=6)
    leases = world.lease(R1, 8, 1)
    for lease in leases[:5]:
        world.episode(R1, lease, 1, num_tokens=3 + lease.trajectory_id)
    world.publish(2, 0)  # a learner that restarts publishes again without training
    world.publish(3, 0)
    dropped = [line for line in world.lines if line["event"] == "dropped"]
    assert [(line["group_id"], line["reason"], line["num_tokens"]) for line in dropped] == [
        (0, "stale", [3, 4]),
        (1, "stale", [5, 6]),
        (2, "stale", [7, 0]),
    ]
    assert dropped[2]["finished"] == [True, False]
    assert world.ledger.state.num_dropped == {"stale": 3}
    row = world.ledger.state.groups.trajectory(leases[6].trajectory_id)
    assert row is not None, "nothing old was generated in group 3"
    assert row.status == "free", "but its engine might still"
    generate(world, 8, 3)
    assert delivered(world.request_batch(0, 3)) == [0]
    assert world.ledger.state.batches.batch(0).stats.max_lag == 0  # type: ignore[union-attr]


def test_a_version_jump_takes_back_old_leases_and_keeps_what_is_young_enough() -> None:
    world = harness(max_lag=1, num_batches=6)
    updated, silent = world.lease(R1, 2, 1)
    world.publish(2, 0)
    world.grow(R1, updated, 3, 2)  # its engine has shown that it serves version 2
    ended = replies(world.publish(3, 0), LeaseEnded)
    assert [(end.trajectory_id, end.reason) for end in ended] == [
        (silent.trajectory_id, "granted at version 1, 2 is the oldest allowed")
    ]
    assert world.ledger.state.num_dropped == {}
    assert replies(world.grow(R1, updated, 3, 2), LeaseEnded) == []


def test_a_token_older_than_its_engine_said_is_refused_and_its_group_goes_on() -> None:
    world = harness(max_lag=0, num_batches=6)
    generate(world, 4, 1)
    train_one(world, 0, 1)
    lying, *honest = world.lease(R1, 4, 2)
    (refused,) = replies(world.send(R1, chunk(lying, 0, 3, 1)), Refused)
    assert "the lease's engine served 2 before" in refused.reason
    for lease in honest:
        world.episode(R1, lease, 2)
    assert delivered(world.request_batch(1, 2)) == []
    (again,) = world.lease(R1, 1, 2)
    assert (again.trajectory_id, again.epoch) == (lying.trajectory_id, 2)
    world.episode(R1, again, 2)
    assert delivered(world.request_batch(1, 2)) == [1]
    assert lying.group_id in group_ids(world, 1)
    assert world.ledger.state.num_dropped == {}


def test_granted_work_follows_the_newest_version_only_inside_the_window() -> None:
    world = harness(max_lag=0, num_batches=6)
    generate(world, 4, 1)
    world.request_batch(0, 1)
    assert granted(world.tick()) == []
    assert world.lease(R1, 4, 1) == [], "the batch is assembled, its publication is not there yet"
    world.trained(0, 1)
    world.publish(2, 1)
    assert len(world.lease(R1, 4, 2)) == 4
