"""Pods of neighbouring releases meet in the middle of an update. Each says what to update first. ``make test-pods``."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from gspo_protocol.limits import PROTOCOL_VERSION
from tests.deploy.cluster import Cluster
from tests.pods.node import Node, Pod
from tests.pods.run import events, until

pytestmark = [pytest.mark.pods, pytest.mark.timeout(1500)]
OLDER: Final = [sys.executable, str(Path(__file__).with_name("older_release.py"))]
START_S: Final = 400.0


def ended(pod: Pod) -> tuple[int, str]:
    """The status that a container ends with, and what its log says."""
    status = pod.process.wait(START_S)
    (event,) = events(pod, "stopped_by_error")
    return status, event["error"]


def refusal(error: str) -> str:
    """What the other end said, as the refused process repeats it."""
    return error.partition("refused this process: ")[2].partition(". On Kubernetes")[0]


def refusals(broker: Pod) -> list[str]:
    return [event["reason"] for event in events(broker, "message_refused")]


def greeted(node: Node, peer: str) -> bool:
    return any(event["peer"] == peer for event in events(node.pods["broker-0"], "hello"))


def test_pods_of_an_older_release_and_of_this_one_name_the_pod_to_update(
    start_node: Callable[[Cluster], Node], plain: Cluster
) -> None:
    broker_image, rollout_image = (plain.role(role).template["spec"]["containers"][0] for role in ("broker", "rollout"))
    with start_node(plain) as node:
        # The learner was updated before its broker.
        broker_image["command"] = OLDER
        old = node.start("broker-0", "broker")
        learner = node.start("learner-0", "learner")
        status, error = ended(learner)
        assert status == 1
        assert f"protocol_version is {PROTOCOL_VERSION}, this broker speaks {PROTOCOL_VERSION - 1}" in error
        assert "pod broker-0: kubectl -n NAMESPACE set image statefulset/broker broker=IMAGE" in error
        assert refusals(old) == [refusal(error)]
        del broker_image["command"]
        node.delete(old)
        until(node, "the learner at the new broker", lambda: greeted(node, "learner"), START_S)

        # A rollout of the older release is still there.
        rollout_image["command"] = OLDER
        rollout = node.start("rollout-5d8f-1", "rollout")
        status, error = ended(rollout)
        assert status == 1
        assert "pod rollout-5d8f-1: kubectl -n NAMESPACE set image deployment/rollout rollout=IMAGE" in error
        assert refusal(error) in refusals(node.pods["broker-0"])
        del rollout_image["command"]
        new = node.start("rollout-6f9c-1", "rollout")
        node.stop(rollout)
        until(node, "the new rollout's work", lambda: node.metrics(new).get("gspo_rollout_chunks_total", 0) > 0, START_S)
