"""A learner on two nodes from the manifests of ``learner-nodes``, each in its own network. Minutes; ``make test-pods``."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from tests.deploy.cluster import Cluster
from tests.pods.conftest import NUM_BATCHES
from tests.pods.node import Node, Pod
from tests.pods.run import audited, events, rows, run_directory, until

pytestmark = [pytest.mark.pods, pytest.mark.timeout(2400)]
READY: Final = {"port": "metrics", "path": "/readyz"}
WORKER_READY: Final = {"port": "health", "path": "/readyz"}
WORKER_LIVES: Final = {"port": "health", "path": "/healthz"}
START_S: Final = 400.0
SEEN_S: Final = 60.0
"""The other node notices a loss in its next collective: at once on an idle machine. torchrun would take five minutes."""


def trained(node: Node) -> int:
    return len(rows(node, "batch"))


def resumptions(pod: Pod) -> list[int]:
    """The batches with which its containers resumed."""
    return [event["next_batch"] for event in events(pod, "resumed")]


def test_two_nodes_of_a_learner_end_and_come_back_together_and_lose_nothing(
    start_node: Callable[[Cluster], Node], two_nodes: Cluster, model: Path, tmp_path: Path
) -> None:
    with start_node(two_nodes) as node:
        worker = node.start("learner-worker-1", "learner-worker")
        waits = (503, "waiting for rank 0 at learner-0.learner:29500\n")
        until(node, "its reason", lambda: node.get(worker, WORKER_READY) == waits, START_S)
        assert node.get(worker, WORKER_LIVES) == (200, "alive\n")
        assert worker.num_restarts == 0, "it ended because the name of rank 0 does not resolve yet"
        node.apply(rollouts=1)
        learner = node.pods["learner-0"]
        until(node, "checkpoint", lambda: bool(events(learner, "checkpoint_saved")), START_S)
        assert node.get(worker, WORKER_READY) == (200, "ready\n")
        rollout = next(pod for pod in node.pods.values() if pod.role == "rollout")
        node.network.bridge.part(rollout.address, worker.address)
        loaded = len(events(rollout, "weights_loaded"))
        until(node, "versions by rank 0 alone", lambda: len(events(rollout, "weights_loaded")) >= loaded + 3, START_S)
        assert events(rollout, "rank_not_reached"), "nothing of them came by way of rank 0"
        node.network.bridge.join(rollout.address, worker.address)

        node.kill(worker)
        until(node, "the other node's end", lambda: learner.num_restarts == 1, SEEN_S)
        assert learner.statuses == [1]
        assert "lost another rank in a collective" in events(learner, "stopped_by_error")[0]["error"]
        before = trained(node)
        until(node, "batches after a loss", lambda: trained(node) >= before + 2, START_S)

        node.delete(worker)
        until(node, "both nodes' end", lambda: len(learner.statuses) == 2 and worker in node.gone, START_S)
        assert (learner.statuses, worker.statuses[-1]) == ([1, 0], 0)
        again = node.pods["learner-worker-1"]
        assert again.address != worker.address
        until(node, "the run's end", lambda: node.get(rollout, READY)[1].startswith("run complete"), START_S)
        until(node, "the learner's end of the run", lambda: bool(events(learner, "run_complete")), START_S)
        assert node.get(again, WORKER_READY) == (200, "ready\n")
        assert learner.num_restarts == 2
        # One restart when it came before the other had quite ended, and then ended with it.
        assert again.num_restarts <= 1

        # After a kill it repeats what came after the checkpoint. When it is asked to stop, it saves first.
        begun = resumptions(learner)
        assert [begun[0] % 2, begun[0] > 0] == [0, True]
        assert begun[1] > begun[0]
        report = audited(node)
        assert report.problems == []
        assert (report.num_batches, report.num_trained_trajectories) == (NUM_BATCHES, NUM_BATCHES * 8 * 8)
        assert_replayed_on_one_machine(run_directory(node), model, tmp_path / "again")


def assert_replayed_on_one_machine(run: Path, model: Path, again: Path) -> None:
    """Replay on two ranks here, and get the two nodes' weights bit for bit."""
    command = [
        sys.executable,
        "-m",
        "gspo_services.runs.replay",
        str(run),
        "--out",
        str(again),
        "--set",
        f"model.path={model}",
    ]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert f"after each of {NUM_BATCHES} of {NUM_BATCHES} batches" in done.stdout
