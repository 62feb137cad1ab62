"""Ranks of a learner, rollouts and their peers are killed while a version is fetched, in a whole run. ``make test-faults``.

GSPO_TEST_KILLS says how many times.
"""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil
import pytest

from gspo_protocol.messages import WeightChunk
from tests.faults.fleet import Fleet
from tests.support.broker.ledger_audit import audit
from tests.support.processes.ports import free_pair
from tests.support.wire.relay import Relay, tag_of

pytestmark = [pytest.mark.faults, pytest.mark.timeout(3600)]

NUM_KILLS: Final = int(os.environ.get("GSPO_TEST_KILLS", "5"))
ROLLOUTS: Final = ("rollout-0", "rollout-1", "rollout-2")
"""The learner sends a version to two, which pass it on to the third."""
FETCH_BYTES_PER_S: Final = 1e6
"""Over the way to rank 0: a fetch takes some tenths of a second."""


def kill_rank(fleet: Fleet, relay: Relay, rank: int) -> None:
    """Nothing of what rank 0 has sent meanwhile arrives."""
    for child in psutil.Process(fleet.members["learner"].pid).children():
        with suppress(psutil.NoSuchProcess):
            if child.environ().get("RANK") == str(rank):
                child.kill()
    relay.cut()


def kill_rollout(fleet: Fleet, name: str) -> None:
    if fleet.members[name].look():
        fleet.members[name].kill_tree()


def victims(fleet: Fleet, relay: Relay) -> list[Callable[[], None]]:
    ranks = [lambda rank=rank: kill_rank(fleet, relay, rank) for rank in (0, 1)]
    return [*ranks, *(lambda name=name: kill_rollout(fleet, name) for name in ROLLOUTS)]


def num_ends(fleet: Fleet) -> int:
    return sum(len(member.ends) for member in fleet.members.values())


def test_kills_amid_publications_leave_no_mixed_version_and_nothing_hangs(tmp_path: Path) -> None:
    settings = ("model.dtype=bfloat16", "learner.num_ranks=2", "learner.zero_stage=3", "learner.checkpoint_every_batches=2")
    with Fleet(tmp_path, *settings) as fleet, Relay(free_pair()) as relay:
        relay.bytes_per_s = FETCH_BYTES_PER_S
        fleet.start("broker")
        fleet.start(
            "learner",
            f"learner.weights_endpoint=tcp://127.0.0.1:{relay.target}",
            f"learner.advertised_weights_endpoint={relay.endpoint}",
        )
        for name in ROLLOUTS:
            fleet.start("rollout", "rollout.peer_weights_endpoint=tcp://127.0.0.1:*", name=name)
        fleet.wait_batches(2)
        for number in range(NUM_KILLS):
            kill, before = victims(fleet, relay)[number % (2 + len(ROLLOUTS))], num_ends(fleet)
            struck = relay.on(tag_of(WeightChunk), kill, direction="down").seen
            fleet.wait_until("a fetch", struck.is_set)
            fleet.wait_until("the end of whom it hit", lambda ends=before: num_ends(fleet) > ends)
            fleet.wait_batches(len(fleet.rows("batch")) + 2)
        fleet.finish()
        assert -signal.SIGKILL in fleet.members["rollout-0"].ends
        served = [row["policy_version"] for name in ROLLOUTS for row in fleet.events(name, "weights_loaded")]
        assert not [row for name in ROLLOUTS for row in fleet.events(name, "weights_not_loaded")]
    assert relay.num_reset >= min(NUM_KILLS, 2), "no fetch was broken off"
    versions = {(row["policy_version"], row["digest"]) for row in fleet.events("learner", "published")}
    assert len({version for version, _ in versions}) == len(versions), "one number for two weights"
    assert set(served) <= {version for version, _ in versions}
    print(f"{NUM_KILLS} kills: {len(versions)} versions, loaded {len(served)} times")
    report = audit(tmp_path)
    assert report.problems == []
    assert report.dropped == {}
