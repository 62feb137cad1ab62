"""Weights are sent through process groups, and a process dies in the middle of an update. ``make test-faults``."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.messages import BroadcastRequest, ProcessGroup
from tests.faults.fleet import Fleet, Member
from tests.support.broker.ledger_audit import audit
from tests.support.wire.relay import Direction, Relay, tag_of

pytestmark = [pytest.mark.faults, pytest.mark.timeout(2400)]
START_S = 900.0
FAILS_S = 60.0
"""The longest that anything may take in a group; a peer that dies is noticed at once."""
SIGMA_LIMIT = 2e-5
"""Bound between engine and learner on tokens of the same version, in float32: other weights show as 100 times that."""
ROLLOUTS = ("rollout-0", "rollout-1")


def start(fleet: Fleet, relay: Relay) -> list[Member]:
    """Start a run and wait until the engines of two rollouts are in a group with the learner; returns the rollouts."""
    fleet.start("broker")
    fleet.start("learner", f"learner.advertised_weights_endpoint={relay.endpoint}")
    members = [fleet.start("rollout", name=name) for name in ROLLOUTS]
    fleet.wait_until("two groups", lambda: len(fleet.events("learner", "weights_group_opened")) == 2, START_S)
    fleet.wait_batches(2)
    return members


def strike_when(fleet: Fleet, relay: Relay, kind: type, direction: Direction, kill: Callable[[], None]) -> None:
    """Kill when a message of this kind passes between a rollout and the learner."""
    fleet.wait_until(f"a {kind.__name__}", relay.on(tag_of(kind), kill, direction=direction).seen.is_set, START_S)


def group_fleet(directory: Path) -> Fleet:
    return Fleet(
        directory,
        "security.allow_plaintext=true",
        "learner.weights_group_backend=gloo",
        "rollout.weights_path=group",
        "learner.checkpoint_every_batches=2",
    )


def finish(fleet: Fleet) -> None:
    """End the run and check that the labelled weights made every token."""
    fleet.finish()
    assert [row["batch"] for row in fleet.rows("batch") if row["mismatch_sigma"] > SIGMA_LIMIT] == []
    assert audit(fleet.directory).problems == []


def test_a_learner_that_dies_in_an_update_leaves_no_engine_waiting_and_its_next_life_continues(tmp_path: Path) -> None:
    fleet = group_fleet(tmp_path)
    with fleet, Relay(fleet.weights_port) as relay:
        rollouts = start(fleet, relay)
        learner = fleet.members["learner"]

        def kill() -> None:
            learner.signal(signal.SIGKILL)
            # An open relay would accept connections for a dead learner, which looks like a learner that wants keys.
            relay.shut()

        # First an engine is paused and waits for a broadcast; in the next life a rollout was just promised a version.
        points: list[tuple[type, Direction]] = [(BroadcastRequest, "up"), (ProcessGroup, "down")]
        for kind, direction in points:
            published = len(fleet.events("learner", "published"))
            failed = num_failed(fleet)
            strike_when(fleet, relay, kind, direction, kill)
            fleet.wait_until("a rollout that reports it", lambda before=failed: num_failed(fleet) > before, FAILS_S)
            fleet.wait_until(
                "the next life", lambda before=published: len(fleet.events("learner", "published")) > before, START_S
            )
            relay.open()
            fleet.wait_batches(len(fleet.rows("batch")) + 2, START_S)
        assert learner.ends == [-signal.SIGKILL] * 2
        assert [member.ends for member in rollouts] == [[], []], "an engine waited for the dead learner"
        finish(fleet)


def test_engines_and_rollouts_that_die_in_an_update_do_not_disturb_the_learner(tmp_path: Path) -> None:
    fleet = group_fleet(tmp_path)
    with fleet, Relay(fleet.weights_port) as relay:
        rollouts = start(fleet, relay)

        def kill_engines() -> None:
            for member in rollouts:
                member.scheduler().kill()

        def kill_rollouts() -> None:
            for member in rollouts:
                member.signal(signal.SIGKILL)

        strike_when(fleet, relay, BroadcastRequest, "up", kill_engines)
        fleet.wait_until("the ends of both rollouts", lambda: [len(member.ends) for member in rollouts] == [1, 1])
        fleet.wait_batches(len(fleet.rows("batch")) + 2, START_S)
        strike_when(fleet, relay, BroadcastRequest, "up", kill_rollouts)
        fleet.wait_until("the next lives", lambda: len(fleet.events("learner", "weights_group_opened")) >= 6, START_S)
        fleet.wait_batches(len(fleet.rows("batch")) + 2, START_S)
        assert fleet.members["learner"].ends == []
        finish(fleet)


def num_failed(fleet: Fleet) -> int:
    return sum(len(fleet.events(name, "weights_group_failed")) for name in ROLLOUTS)
