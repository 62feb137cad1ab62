"""Two runs in two namespaces of one cluster; one of them is deleted while the other trains. Minutes; ``make test-pods``."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from tests.deploy.cluster import K8S, Cluster, Object, render
from tests.pods.api_server import ApiServer
from tests.pods.conftest import edit, needs_a_machine_for_pods
from tests.pods.network import Bridge
from tests.pods.node import Node, Pod
from tests.pods.run import audited, events, rows, until

pytestmark = [pytest.mark.pods, pytest.mark.timeout(1500)]
READY: Final = {"port": "metrics", "path": "/readyz"}
START_S: Final = 400.0
END_S: Final = 120.0
NUM_BATCHES: Final = 16
CONNECT_S: Final = 2.0


class Runs(NamedTuple):
    """The pods of two runs on one cluster, and the objects of the first one as ``kubectl delete -k`` finds them."""

    api: ApiServer
    first: Node
    first_objects: list[Object]
    other: Node


@pytest.fixture
def runs(tmp_path: Path, model: Path) -> Iterator[Runs]:
    """The overlays ``cpu`` and ``another-run``, after ``cluster/priorities``; the other run is short."""
    needs_a_machine_for_pods(tmp_path)
    api = ApiServer()
    first, other = render(K8S / "overlays" / "cpu"), render(K8S / "overlays" / "another-run")
    for old, new in {
        "num_batches = 60": f"num_batches = {NUM_BATCHES}",
        "groups_per_batch = 32": "groups_per_batch = 8",
        "every_batches = 5\nnum_tasks = 128": f"every_batches = {NUM_BATCHES}\nnum_tasks = 8",
        "checkpoint_every_batches = 5": "checkpoint_every_batches = 2",
    }.items():
        edit(Cluster(other), old, new)
    for objects in (render(K8S / "cluster" / "priorities"), first, other):
        api.apply(objects)
    with ExitStack() as stack:
        bridge = stack.enter_context(Bridge())
        nodes = [
            stack.enter_context(Node(api.namespaces[name], tmp_path / name, model, bridge=bridge, admit=api.admit))
            for name in ("gspo", "gspo-another")
        ]
        yield Runs(api, nodes[0], first, nodes[1])


def reaches(node: Node, source: str, target: Pod, port: str) -> bool:
    """Whether a connection from the pod ``source`` is accepted."""

    def connect() -> bool:
        try:
            with socket.create_connection((target.address, target.pods.ports[port]), CONNECT_S):
                return True
        except OSError:
            return False

    return node.network.inside(source, connect)


def test_a_run_that_is_deleted_takes_nothing_of_the_run_beside_it(runs: Runs) -> None:
    first, other = runs.first, runs.other
    other.apply(rollouts=1)
    first.apply(rollouts=0)
    published = lambda: bool(events(first.pods["broker-0"], "version_published"))  # noqa: E731
    until(first, "a published version of the first run", published, START_S)
    until(other, "third batch", lambda: len(rows(other, "batch")) >= 3, START_S)
    assert reaches(first, "learner-0", first.pods["broker-0"], "batch")
    assert not reaches(other, "learner-0", first.pods["broker-0"], "batch"), "the other run's policies let it in"

    trained = len(rows(other, "batch"))
    runs.api.delete(runs.first_objects)
    for pod in list(first.pods.values()):
        first.delete(pod)
    until(first, "end of the first run", lambda: not first.pods, END_S)
    assert [pod.statuses for pod in first.gone] == [[0], [0]]
    assert runs.api.namespaces["gspo"].objects == []

    until(other, "batches after the deletion", lambda: len(rows(other, "batch")) >= trained + 2, START_S)
    # A new pod needs everything that the run has in the cluster once more: its classes, configuration, volumes and policies.
    learner = other.pods["learner-0"]
    other.delete(learner)
    until(other, "another learner", lambda: other.pods.get("learner-0") not in (None, learner), END_S)
    rollout = next(pod for pod in other.pods.values() if pod.role == "rollout")
    until(other, "the run's end", lambda: other.get(rollout, READY)[1].startswith("run complete"), START_S)
    assert [pod.num_restarts for pod in other.pods.values()] == [0, 0, 0]
    report = audited(other)
    assert report.problems == []
    assert (report.num_batches, report.num_trained_trajectories) == (NUM_BATCHES, NUM_BATCHES * 8 * 8)
