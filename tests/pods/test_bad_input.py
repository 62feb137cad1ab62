"""Users' mistakes in a cluster end in a status, a log line or a probe that says what to do. ``make test-pods``."""

import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from gspo_services.shared.net.security import write_key_pair
from gspo_services.shared.runtime.errors import EXIT_OCCUPIED
from tests.deploy.cluster import Cluster
from tests.pods.conftest import edit, use_keys
from tests.pods.network import command
from tests.pods.node import Node, Pod
from tests.pods.run import events, until

pytestmark = [pytest.mark.pods, pytest.mark.timeout(600)]
READY: Final = {"port": "metrics", "path": "/readyz"}
START_S: Final = 120.0


def ended(node: Node, pod: Pod) -> int:
    """The status that a container ends with. Kubernetes would start it again, with a growing pause."""
    return pod.process.wait(START_S)


def test_a_missing_secret_is_named_with_its_file(start_node: Callable[[Cluster], Node], plain: Cluster) -> None:
    use_keys(plain)
    with start_node(plain) as node:
        pod = node.start("broker-0", "broker")
        assert ended(node, pod) == 2
        (event,) = events(pod, "cannot_start")
        assert "/etc/gspo/keys/broker.secret" in event["error"]


def test_a_wrong_key_is_refused_and_both_ends_say_so(
    start_node: Callable[[Cluster], Node], secured: Cluster, tmp_path: Path
) -> None:
    public = next(item for item in secured.of_kind("Secret") if "gspo-public-keys" in item["metadata"]["name"])
    write_key_pair(tmp_path / "others", "learner", overwrite=True)
    others = (tmp_path / "others" / "learner.public").read_bytes()
    with start_node(secured) as node:
        pod = node.start("learner-0", "learner")
        # The broker's list has another key under the learner's name.
        public["data"]["learner.public"] = base64.b64encode(others).decode()
        broker = node.start("broker-0", "broker")
        assert ended(node, pod) == 1
        (event,) = events(pod, "stopped_by_error")
        assert "refused the key learner" in event["error"]
        assert "learner.public" in event["error"]
        refused = 'gspo_broker_refused_connections_total{reason="unknown_key"}'
        until(node, "a refusal counted", lambda: node.metrics(broker).get(refused, 0) > 0, START_S)


def test_a_learner_without_a_broker_waits_and_names_what_it_waits_for(
    start_node: Callable[[Cluster], Node], plain: Cluster
) -> None:
    with start_node(plain) as node:
        pod = node.start("learner-0", "learner")
        reason = "no answer from the broker at tcp://broker:7002"
        until(node, "its reason", lambda: reason in node.get(pod, READY)[1], START_S)
        assert node.get(pod, READY)[0] == 503
        assert pod.process.poll() is None
        node.start("broker-0", "broker")
        until(node, "a published version", lambda: bool(events(node.pods["broker-0"], "version_published")), START_S)


def test_a_wrong_model_ends_with_the_path(start_node: Callable[[Cluster], Node], plain: Cluster) -> None:
    edit(plain, "/models/tiny", "/models/larger")
    with start_node(plain) as node:
        pod = node.start("learner-0", "learner")
        assert ended(node, pod) == 2
        (event,) = events(pod, "cannot_start")
        assert "/models/larger" in event["error"]


@pytest.fixture
def small_volume(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "small"
    path.mkdir()
    command("mount", "-t", "tmpfs", "-o", "size=4m,mode=777", "tmpfs", str(path))
    yield path
    command("umount", "-l", str(path))


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as ballast:
        while True:
            ballast.write(bytes(1 << 12))


def test_a_full_volume_makes_the_broker_wait_until_there_is_room(
    start_node: Callable[[Cluster], Node], plain: Cluster, small_volume: Path
) -> None:
    with start_node(plain) as node:
        command("mount", "--bind", str(small_volume), str(node.volume("run-broker-0")))
        try:
            broker = node.start("broker-0", "broker")
            until(node, "a ready broker", lambda: node.is_ready(broker), START_S)
            with pytest.raises(OSError, match="No space left"):
                fill(small_volume / "ballast")
            node.start("learner-0", "learner")
            until(node, "its reason", lambda: "disk" in node.get(broker, READY)[1], START_S)
            assert node.get(broker, READY)[0] == 503
            assert node.metrics(broker)["gspo_broker_commit_failures_total"] > 0
            (small_volume / "ballast").unlink()
            until(node, "a published version", lambda: bool(events(broker, "version_published")), START_S)
            until(node, "a ready broker", lambda: node.is_ready(broker), START_S)
        finally:
            command("umount", "-l", str(node.volume("run-broker-0")))


def test_a_second_learner_is_refused_and_the_first_continues(start_node: Callable[[Cluster], Node], plain: Cluster) -> None:
    with start_node(plain) as node:
        broker = node.start("broker-0", "broker")
        first = node.start("learner-0", "learner")
        until(node, "a published version", lambda: bool(events(broker, "version_published")), START_S)
        second = node.start("learner-1", "learner")
        assert ended(node, second) == EXIT_OCCUPIED
        (event,) = events(second, "occupied")
        assert "learner" in event["error"]
        refused = 'gspo_broker_refused_total{reason="refused",type="hello"}'
        assert node.metrics(broker)[refused] > 0
        assert first.process.poll() is None
        assert node.get(first, READY)[0] == 200


def test_pods_that_crash_for_a_broken_configuration_heal_with_the_mended_one(
    start_node: Callable[[Cluster], Node], plain: Cluster
) -> None:
    edit(plain, "max_lag = 2", "max_lags = 2")
    with start_node(plain) as node:
        broker, learner = node.start("broker-0", "broker"), node.start("learner-0", "learner")
        broken = (broker, learner)
        until(node, "both crash again and again", lambda: all(pod.num_restarts >= 2 for pod in broken), START_S)
        assert {status for pod in broken for status in pod.statuses} == {2}
        assert "max_lags: unknown key" in events(broker, "cannot_start")[0]["error"]
        edit(plain, "max_lags = 2", "max_lag = 2")
        assert node.update() == [broker, learner]
        until(node, "new pods", lambda: all(node.pods.get(pod.name) not in (None, pod) for pod in broken), START_S)
        until(node, "a published version", lambda: bool(events(node.pods["broker-0"], "version_published")), START_S)
        assert node.is_ready(node.pods["broker-0"])
        assert [node.pods[pod.name].num_restarts for pod in broken] == [0, 0]
