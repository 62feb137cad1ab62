"""A learner is killed at chosen points between a batch and the report of its checkpoint. ``make test-faults``."""

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gspo_protocol.messages import Batch, Checkpointed, Published, Trained
from tests.faults.fleet import Fleet
from tests.support.broker.ledger_audit import audit
from tests.support.wire.relay import Relay, tag_of

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]
TRAINING_S = 0.1
"""Time into the optimizer steps of a batch, which take about half a second."""
ARRIVES_S = 0.3


class Killer:
    """Kills the learner of a fleet when a message passes the relay between it and the broker."""

    def __init__(self, fleet: Fleet, relay: Relay) -> None:
        self._fleet = fleet
        self._relay = relay
        self._watch = threading.Event()

    def kill(self) -> None:
        self._fleet.members["learner"].signal(signal.SIGKILL)

    def before(self, kind: type) -> None:
        """Kill at the first byte of a message of this kind, which the broker never gets; earlier messages arrive."""

        def act() -> None:
            self.kill()
            # Earlier messages are still on their way: a reset could overtake them.
            time.sleep(ARRIVES_S)
            self._relay.cut()

        self._wait(self._relay.on(tag_of(kind), act).seen.is_set)

    def while_training(self) -> None:
        """Kill after a batch was delivered and before its version is published."""
        delivered = self._relay.on(tag_of(Batch), lambda: None, direction="down").seen
        self._wait(delivered.is_set)
        published = self._relay.on(tag_of(Published), lambda: None).seen
        self._watch.wait(TRAINING_S)
        self.kill()
        self._relay.cut()
        assert not published.is_set(), "it had published before the kill"

    def while_saving(self) -> None:
        """Kill while a checkpoint is being written."""
        checkpoints = self._fleet.directory / "checkpoints"
        while not list(checkpoints.glob(".partial-version-*")):
            self._watch.wait(0.002)
        self.kill()
        assert list(checkpoints.glob(".partial-version-*")), "it was written in full before the kill"

    def _wait(self, condition: Callable[[], bool]) -> None:
        self._fleet.wait_until("the point to kill at", condition)


def test_a_learner_killed_anywhere_between_two_checkpoints_repeats_only_what_it_must(tmp_path: Path) -> None:
    with (
        Fleet(tmp_path, "learner.checkpoint_every_batches=2") as fleet,
        Relay(fleet.batch_port) as relay,
    ):
        fleet.start("broker")
        fleet.start("rollout", name="rollout-0")
        learner = fleet.start("learner", f"broker.batch_endpoint={relay.endpoint}")
        killer = Killer(fleet, relay)
        points: list[tuple[str, Callable[[], None]]] = [
            ("training", killer.while_training),
            ("published", lambda: killer.before(Published)),
            ("trained", lambda: killer.before(Trained)),
            ("saving", killer.while_saving),
            ("checkpointed", lambda: killer.before(Checkpointed)),
        ]
        fleet.wait_batches(1)
        for number, (name, strike) in enumerate(points, 1):
            strike()
            fleet.wait_until(f"the kill at {name}", lambda n=number: len(learner.ends) == n)
            trained = len(fleet.rows("batch"))
            fleet.wait_batches(trained + 2)
        # Each kill may undo two batches, so how far the run is by now depends on the machine.
        fleet.wait_until("the sixth batch", lambda: max(row["batch"] for row in fleet.rows("batch")) >= 5)
        fleet.finish()
        assert learner.ends[:-1] == [-signal.SIGKILL] * len(points)
    versions = [(row["policy_version"], row["digest"]) for row in fleet.events("learner", "published")]
    assert len({version for version, _ in versions}) == len(set(versions)), "one number for two weights"
    assert len(set(versions)) < len(versions), "the weights from before a kill kept their number"
    report = audit(tmp_path)
    assert report.problems == []
    assert report.dropped == {}
    assert report.num_batches >= 6
    assert report.num_trained_again <= 2 * len(points)
