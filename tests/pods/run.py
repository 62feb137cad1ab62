"""A run on pods, watched through their probes, metrics, logs and files."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from gspo_services.runs.audit import audit_run
from gspo_services.runs.audit.findings import Audit
from tests.pods.node import Node, Pod

LOOK_S: Final = 0.5
_never = threading.Event()


def until(node: Node, what: str, condition: Callable[[], bool], timeout_s: float) -> float:
    """Play Kubernetes until ``condition`` holds; returns the seconds. Raises: AssertionError with the ends of the logs."""
    begin = time.monotonic()
    while True:
        node.look()
        if condition():
            return time.monotonic() - begin
        assert time.monotonic() - begin < timeout_s, f"no {what} within {timeout_s:.0f} s\n{ends_of_logs(node)}"
        _never.wait(LOOK_S)


def ends_of_logs(node: Node) -> str:
    return "\n".join(f"--- {pod.name}\n{pod.log.read_text()[-1500:]}" for pod in node.pods.values())


def run_directory(node: Node) -> Path:
    """The broker's run.directory, on its volume."""
    return node.volume("run-broker-0") / "run"


def rows(node: Node, event: str) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl of one kind; a line that is being written is left out."""
    path = run_directory(node) / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.is_file() else []
    return [row for row in map(json.loads, lines) if row["event"] == event]


def events(pod: Pod, event: str) -> list[dict[str, Any]]:
    """A pod's log lines of one event."""
    lines = pod.log.read_text(errors="replace").splitlines()
    found = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
    return [row for row in found if row.get("event") == event]


def accepted_chunks(node: Node, pod: Pod) -> float:
    """A lower bound of a rollout's acknowledged chunks: those that it sent, less all unacknowledged messages."""
    metrics = node.metrics(pod)
    return metrics.get("gspo_rollout_chunks_total", 0.0) - metrics.get("gspo_rollout_unacknowledged_messages", 0.0)


def audited(node: Node) -> Audit:
    return audit_run(run_directory(node))
