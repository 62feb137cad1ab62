"""The demo from the manifests of the overlay ``cpu``, every pod in its own network. Minutes; ``make test-pods``."""

import time
from collections.abc import Callable
from typing import Final

import pytest

from tests.deploy.cluster import Cluster
from tests.pods.node import Node
from tests.pods.run import accepted_chunks, audited, events, rows, until

pytestmark = [pytest.mark.pods, pytest.mark.timeout(2400)]
PARTITION_S: Final = 30.0
READY: Final = {"port": "metrics", "path": "/readyz"}


def test_the_demo_learns_over_four_pods_through_a_partition_and_a_restart_of_the_learner(
    start_node: Callable[[Cluster], Node],
    secured: Cluster,
) -> None:
    with start_node(secured) as node:
        node.apply(rollouts=2)
        until(node, "sixth batch", lambda: len(rows(node, "batch")) >= 6, 600)
        first, partitioned = [pod for pod in node.pods.values() if pod.role == "rollout"]
        learner = node.pods["learner-0"]
        node.network.cut(partitioned.name)
        begin = time.monotonic()
        # Not renewed, or sooner, because the other rollout has room and the learner waits.
        ends = ("lease_expired", "lease_taken_back")
        until(node, "its leases' end", lambda: any(events(node.pods["broker-0"], end) for end in ends), 60)
        trained = len(rows(node, "batch"))
        node.delete(learner)
        until(node, "another learner", lambda: node.pods.get("learner-0") not in (None, learner), 120)
        assert node.pods["learner-0"].address != learner.address
        assert learner.statuses == [0]
        until(node, "batches of the other rollout alone", lambda: len(rows(node, "batch")) >= trained + 2, 300)
        until(node, "the partition's end", lambda: time.monotonic() - begin >= PARTITION_S, PARTITION_S + 10)
        assert node.get(partitioned, READY) == (503, "the broker is away\n")
        sent = accepted_chunks(node, partitioned)
        node.network.heal(partitioned.name)
        until(node, "chunks after the partition", lambda: accepted_chunks(node, partitioned) > sent, 120)
        assert node.is_ready(partitioned)
        until(node, "the run's end", lambda: node.get(first, READY)[1].startswith("run complete"), 1500)

        assert {event["next_batch"] for event in events(node.pods["learner-0"], "resumed")} != set()
        assert [pod.num_restarts for pod in node.pods.values()] == [0, 0, 0, 0]
        rewards = [row["eval/reward"] for row in rows(node, "eval")]
        assert rewards[0] <= 0.4
        assert rewards[-1] >= 0.85
        assert all(event["max_lag"] <= 2 for event in events(node.pods["broker-0"], "batch_assembled"))
        report = audited(node)
        assert report.problems == []
        assert report.num_batches == 60
        # A learner that comes back publishes one more version, so groups at the bound of max_lag become too old by one.
        assert set(report.dropped) <= {"stale"}
        assert report.dropped.get("stale", 0) <= 2 * 32
