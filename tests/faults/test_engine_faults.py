"""SGLang hangs, dies in the middle of a weight update, or is sent damaged weights. ``make test-faults``."""

import signal
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from gspo_protocol.messages import WeightChunk
from tests.faults.fleet import Fleet, Member
from tests.support.broker.ledger_audit import audit
from tests.support.wire.relay import Relay, tag_of

pytestmark = [pytest.mark.faults, pytest.mark.timeout(2400)]
WORK_STALL_S = 20.0
BATCH_STALL_S = 8.0
HANG_S = 30
SIGMA_LIMIT = 2e-5
"""Bound between engine and learner on tokens of the same version, in float32: other weights show as 100 times that."""


def count(fleet: Fleet, name: str, event: str) -> int:
    return len(fleet.events(name, event))


def assert_the_right_weights_made_every_token(fleet: Fleet) -> None:
    assert [row["batch"] for row in fleet.rows("batch") if row["mismatch_sigma"] > SIGMA_LIMIT] == []


def start_two(fleet: Fleet, learner: str, *second: str) -> Member:
    """A run of two rollouts at work; returns the second, which has settings of its own."""
    fleet.start("broker")
    fleet.start("learner", learner)
    fleet.start("rollout", name="rollout-0")
    member = fleet.start("rollout", *second, name="rollout-1")
    fleet.wait_batches(2)
    fleet.wait_until("leases", lambda: fleet.num_leases("rollout-1") > 4)
    # The first batch of a new server waits for a compiler: minutes on a busy machine.
    fleet.wait_until("tokens of both", lambda: count(fleet, "rollout-1", "weights_loaded") > 1)
    return member


def test_a_run_survives_connections_that_stall_for_longer_than_a_lease_and_break(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "learner.checkpoint_every_batches=10")
    with fleet, Relay(fleet.work_port) as work, Relay(fleet.batch_port) as batch:
        learner = f"broker.batch_endpoint={batch.endpoint}"
        rollout = start_two(fleet, learner, f"broker.work_endpoint={work.endpoint}")
        pause = threading.Event()
        fleet.wait_until("leases", lambda: fleet.num_leases("rollout-1") > 4)
        work.stall()
        pause.wait(WORK_STALL_S)
        fleet.wait_until("end of its leases", lambda: count(fleet, "broker", "lease_expired") > 0)
        work.cut()
        work.heal()
        fleet.wait_batches(len(fleet.rows("batch")) + 1)
        # The learner's connection is half open, and later silent.
        batch.half_open()
        fleet.wait_batches(len(fleet.rows("batch")) + 1)
        batch.stall()
        pause.wait(BATCH_STALL_S)
        batch.cut()
        batch.heal()
        fleet.wait_batches(len(fleet.rows("batch")) + 2)
        assert (rollout.ends, fleet.members["learner"].ends) == ([], [])
        fleet.finish()
        assert_the_right_weights_made_every_token(fleet)
    report = audit(tmp_path)
    assert report.problems == []
    assert report.num_trained_again == 0


def test_a_server_that_hangs_for_a_while_recovers_and_one_that_hangs_for_ever_ends_its_rollout(tmp_path: Path) -> None:
    with Fleet(tmp_path, "learner.checkpoint_every_batches=10") as fleet:
        sick = start_two(fleet, "learner.checkpoint_every_batches=10", f"rollout.engine_timeout_s={HANG_S}")
        scheduler = sick.scheduler()
        scheduler.send_signal(signal.SIGSTOP)
        # Its episodes go on elsewhere, long before a request has been silent for as long as it may be.
        fleet.wait_until("giving up", lambda: count(fleet, "broker", "lease_taken_back") > 0)
        scheduler.send_signal(signal.SIGCONT)
        loaded = count(fleet, "rollout-1", "weights_loaded")
        fleet.wait_until("new weights in it", lambda: count(fleet, "rollout-1", "weights_loaded") > loaded)
        assert sick.ends == []

        fleet.wait_until("leases", lambda: fleet.num_leases("rollout-1") > 4)
        scheduler.send_signal(signal.SIGSTOP)
        held = fleet.leased("rollout-1")
        assert held
        fleet.wait_until("end of the rollout", lambda: sick.ends == [1])
        (ended,) = fleet.events("rollout-1", "stopped_by_error")
        assert "no answer in time" in ended["error"], ended
        assert is_gone(scheduler)
        # Taken back while the engine hung, or handed back at the end of the rollout: the other one goes on with them.
        fleet.wait_until("its trajectories go on", lambda: held <= fleet.finished())
        fleet.finish()
        assert_the_right_weights_made_every_token(fleet)
    report = audit(tmp_path)
    assert report.problems == []
    assert report.num_trained_again == 0


def is_gone(process: psutil.Process) -> bool:
    """Whether a process has ended, also where process 1 does not reap orphans."""
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


class Update:
    """A weight update of SGLang, watched in its requests, so that a fault can strike at a chosen one."""

    def __init__(self, fleet: Fleet, http: Relay) -> None:
        self._fleet = fleet
        self._http = http

    def strike(self, request: str, action: Callable[[], None]) -> None:
        """Do ``action`` before SGLang receives ``request``."""

        def act() -> None:
            action()
            self._http.cut()

        watch = self._http.on(f"POST {request} ".encode(), act)
        self._fleet.wait_until(f"{request} to strike at", watch.seen.is_set)


def test_a_server_killed_or_left_in_the_middle_of_an_update_and_damaged_weights_never_serve(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "learner.checkpoint_every_batches=10")
    with fleet, Relay(fleet.engine_port) as http, Relay(fleet.weights_port) as weights:
        engine = fleet.start_engine()
        fleet.start("broker")
        fleet.start("learner", f"learner.advertised_weights_endpoint={weights.endpoint}")
        rollout = fleet.start("rollout", f"rollout.server_url={http.url}", name="rollout-0")
        fleet.wait_batches(2)
        update = Update(fleet, http)

        # Between pause and load, and between load and verification, for which the engine sums its parameters.
        for number, request in enumerate(("/update_weights_from_disk", "/update_weights_from_tensor"), 1):
            update.strike(request, engine.kill_tree)
            fleet.wait_until("end of the rollout", lambda n=number: len(rollout.ends) >= n)
            # The update's own request may fail first, or the watch may find the server dead: each ends the rollout.
            noticed = fleet.events("rollout-0", "weights_not_loaded") + fleet.events("rollout-0", "stopped_by_error")
            assert noticed, "it did not notice"
            trained = len(fleet.rows("batch"))
            fleet.wait_batches(trained + 2, 300)
        # The rollout dies and leaves a server that has new weights and does not generate.
        update.strike("/continue_generation", lambda: rollout.signal(signal.SIGKILL))
        fleet.wait_batches(len(fleet.rows("batch")) + 2)
        assert -signal.SIGKILL in rollout.ends

        # A chunk of weights is damaged; its connection breaks; it stalls.
        bad = weights.flip(tag_of(WeightChunk), 2000)
        fleet.wait_until("a damaged chunk", bad.seen.is_set)
        fleet.wait_until("a fetch that failed", lambda: count(fleet, "rollout-0", "weights_not_fetched") > 0, 60)
        assert "has digest" in fleet.events("rollout-0", "weights_not_fetched")[-1]["error"]
        fleet.wait_batches(len(fleet.rows("batch")) + 2)
        for fault in (weights.cut, weights.half_open, weights.stall):
            struck = weights.on(tag_of(WeightChunk), fault, direction="down")
            fleet.wait_until("a chunk to strike at", struck.seen.is_set)
            before = count(fleet, "rollout-0", "weights_loaded")
            if fault == weights.stall:
                threading.Event().wait(BATCH_STALL_S)
                weights.heal()
            fleet.wait_until("the version after all", lambda n=before: count(fleet, "rollout-0", "weights_loaded") > n, 90)
        fleet.finish()
        assert_the_right_weights_made_every_token(fleet)
        assert weights.num_flipped == 1
    report = audit(tmp_path)
    assert report.problems == []
    assert report.num_trained_again == 0
    assert report.num_batches >= 6
