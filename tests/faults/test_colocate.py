"""A run whose learner and rollout time-share one device, with real SGLang and DeepSpeed on a CPU: nothing is generated
while the learner has it, and whoever is killed with it does not keep the device. ``make test-faults``."""

import json
import os
import signal
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from gspo_services.prepare.tiny_models.tiny import make_tiny_model
from gspo_services.shared.colocate import LOCK_FILE
from tests.support.broker.ledger_audit import audit
from tests.support.processes.run_process import REPOSITORY, RunProcess

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]
NUM_BATCHES = 8
Span = tuple[datetime, datetime]


def spans_of_learner(run: RunProcess) -> list[Span]:
    """The spans of the device that the learner ended itself, by its log."""
    events = sorted(
        (row["timestamp"], name) for name in ("device_taken", "device_given_back") for row in run.events("learner", name)
    )
    return [
        (datetime.fromisoformat(begin), datetime.fromisoformat(end))
        for (begin, first), (end, second) in pairwise(events)
        if (first, second) == ("device_taken", "device_given_back")
    ]


def spans_of_requests(directory: Path) -> Iterator[Span]:
    """From when SGLang received each of our requests until it had answered, by its own log."""
    received: dict[str, datetime] = {}
    for line in (directory / "logs" / "rollout-0-sglang.log").read_text(errors="replace").splitlines():
        if '"event": "request.' not in line:
            continue
        row = json.loads(line[line.index("{") :])
        time = datetime.fromisoformat(row["timestamp"]).astimezone(UTC)
        # Of several samples that were asked for together there is a list.
        for rid in row["rid"] if isinstance(row["rid"], list) else [row["rid"]]:
            if row["event"] == "request.received":
                received[rid] = time
            elif "#" in rid:  # Ours; the server's own requests, before it is ready, have none.
                yield received[rid], time


def has_stopped(process: psutil.Process) -> bool:
    return bool(process.status() == psutil.STATUS_STOPPED)


def kill_with_the_device(run: RunProcess, module: str, name: str) -> None:
    """SIGKILL while it holds the lock: it is stopped first, so that it cannot give it back between the look and the kill."""
    lock = run.directory / LOCK_FILE
    while True:
        run.wait_until(f"the device of {name}", lambda: lock.read_text() == name, 120)
        process = psutil.Process(run.pid_of(module))
        process.suspend()
        run.wait_until("its stop", partial(has_stopped, process), 10)
        if lock.read_text() == name:
            os.kill(process.pid, signal.SIGKILL)
            return
        process.resume()


def test_both_sides_share_the_device_and_a_kill_of_its_holder_costs_only_its_own_work(tmp_path: Path) -> None:
    model, directory = tmp_path / "model", tmp_path / "run"
    make_tiny_model(model, num_steps=3, num_eval_episodes=1, progress=lambda _: None)
    with RunProcess(
        REPOSITORY / "examples/calculator.toml",
        directory,
        f"model.path={model}",
        "run.colocate=true",
        f"run.num_batches={NUM_BATCHES}",
        "rollout.num_servers=1",
        'rollout.server_args=["--log-requests", "--log-requests-level", "0", "--log-requests-format", "json"]',
        "batch.groups_per_batch=4",
        "batch.group_size=4",
        "batch.max_lag=1",
        "evaluation.num_tasks=8",
        "evaluation.every_batches=2",
        "learner.checkpoint_every_batches=2",
        "broker.lease_s=5",
    ) as run:
        run.wait_until("two batches", lambda: len(run.rows("batch")) >= 2, 300)
        kill_with_the_device(run, "gspo_services.rollout", "rollout-0")
        run.wait_until("two more batches", lambda: len(run.rows("batch")) >= 4, 300)
        kill_with_the_device(run, "gspo_services.learner", "learner")
        assert run.wait_finished(400) == 0, run.tail()
    report = audit(directory)
    assert (report.problems, report.dropped, report.num_batches) == ([], {}, NUM_BATCHES)
    held, requests = spans_of_learner(run), list(spans_of_requests(directory))
    # The engine is made, the first version published, and one span for each batch that no kill interrupted.
    assert len(held) >= NUM_BATCHES
    assert len(requests) >= NUM_BATCHES * 4 * 4
    together = [(span, request) for span in held for request in requests if request[0] < span[1] and span[0] < request[1]]
    assert together == []
    # Held-out tasks were sampled, too, and both sides waited for each other.
    assert len(run.rows("eval")) >= NUM_BATCHES // 2
    for process in ("learner", "rollout-0"):
        assert any(row["waited_s"] > 0.05 for row in run.events(process, "device_taken"))
    assert not run.leftovers()
