"""Rollouts come and go under load, as with ``kubectl scale``. Minutes; ``make test-pods``."""

import time
from collections.abc import Callable

import pytest

from tests.deploy.cluster import Cluster
from tests.pods.node import Node
from tests.pods.run import accepted_chunks, audited, events, rows, until

pytestmark = [pytest.mark.pods, pytest.mark.timeout(2400)]


def test_two_rollouts_become_six_and_then_one_and_nothing_is_lost(
    start_node: Callable[[Cluster], Node], plain: Cluster
) -> None:
    with start_node(plain) as node:
        node.apply(rollouts=2)
        until(node, "third batch", lambda: len(rows(node, "batch")) >= 3, 600)
        joined = node.scale(6)
        assert len(joined) == 4
        took: dict[str, float] = {}

        def all_work() -> bool:
            for pod in joined:
                if pod.name not in took and accepted_chunks(node, pod) > 0:
                    took[pod.name] = time.monotonic() - pod.started
            return len(took) == len(joined)

        until(node, "work of all six", all_work, 900)
        print("seconds from a pod's start to its first accepted chunk:", sorted(round(value, 1) for value in took.values()))
        trained = len(rows(node, "batch"))
        until(node, "two batches of six rollouts", lambda: len(rows(node, "batch")) >= trained + 2, 300)
        left = node.scale(1)
        assert len(left) == 5
        grace_s = left[0].pods.spec["terminationGracePeriodSeconds"]
        ended_s = until(node, "the end of five", lambda: all(pod in node.gone for pod in left), grace_s)
        print(f"five rollouts drained and ended in {ended_s:.1f} s")
        assert [pod.statuses for pod in left] == [[0]] * 5
        trained = len(rows(node, "batch"))
        until(node, "three batches of one rollout", lambda: len(rows(node, "batch")) >= trained + 3, 600)

        assert all(event["max_lag"] <= 2 for event in events(node.pods["broker-0"], "batch_assembled"))
        assert [pod.num_restarts for pod in node.pods.values()] == [0, 0, 0]
        for role in ("rollout", "learner", "broker"):
            for pod in [pod for pod in node.pods.values() if pod.role == role]:
                node.stop(pod)
        report = audited(node)
        assert report.problems == []
        assert report.dropped == {}
