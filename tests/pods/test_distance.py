"""Rollouts far from their broker: 100 ms there and back and one packet in a hundred lost. ``make test-pods``.

The broker is a real process; rollouts and learner are the real connections with made-up tokens, at the pace of an engine.
The same run without the distance is measured beside it: python -m pytest -m pods -s tests/pods/test_distance.py
"""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import pytest
import zmq.asyncio

from gspo_services.runs.audit import audit_run
from gspo_services.shared.net.security import Security
from tests.pods.network import command, inside
from tests.support.broker.peers import ScriptedLearner, ScriptedRollout
from tests.support.broker.process import BrokerProcess, broker_process
from tests.support.wire.distance import INTERFACE

pytestmark = [pytest.mark.pods, pytest.mark.timeout(900)]
HOME, SITE = "10.78.0.1", "10.78.0.2"
PORT: Final = 7001
DELAY_S: Final = 0.05
LOSS: Final = 0.01
NUM_BATCHES: Final = 20
NUM_ROLLOUTS: Final = 4
MAX_LAG: Final = 2
ACTION_TOKENS: Final = 40
CHUNK_S: Final = 0.1
"""An episode streams ten chunks of four tokens: about a second."""
ALLOWED: Final = Security(allow_plaintext=True)


class Outcome(NamedTuple):
    """One run."""

    seconds: float
    lags: list[float]
    """The mean lag of each batch at the time of its assembly."""
    sent: int
    lost: int
    chunks: int
    handshakes: int


class Far(NamedTuple):
    """Two namespaces with a way between them."""

    home: str
    site: str
    line: "subprocess.Popen[str]"


@contextmanager
def far_apart(delay_s: float, loss: float) -> Iterator[Far]:
    prefix = f"far{os.getpid() % 100_000}"
    names = (f"{prefix}-home", f"{prefix}-site")
    for name in names:
        command("ip", "netns", "add", name)
    words = [sys.executable, "-m", "tests.support.wire.distance", *names, str(delay_s), str(loss)]
    line = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert line.stdout is not None
        assert line.stdout.readline() == "ready\n"
        for name, own, other in ((names[0], HOME, SITE), (names[1], SITE, HOME)):
            command("ip", "-n", name, "addr", "add", own, "peer", other, "dev", INTERFACE)
            command("ip", "-n", name, "link", "set", INTERFACE, "up")
            command("ip", "-n", name, "link", "set", "lo", "up")
        yield Far(*names, line)
    finally:
        line.kill()
        line.communicate()
        for name in names:
            command("ip", "netns", "del", name)


async def home(directory: Path, ready: threading.Event, done: threading.Event) -> tuple[float, list[float]]:
    """Broker and learner. Returns the seconds from the first to the last batch, and the mean lag of each."""
    settings = {
        "run": {"num_batches": NUM_BATCHES},
        "batch": {"group_size": 4, "groups_per_batch": 4, "mini_batches": 1, "max_lag": MAX_LAG},
        "broker": {"work_endpoint": f"tcp://{HOME}:{PORT}"},
        "security": {"allow_plaintext": True},
    }
    context = zmq.asyncio.Context()
    try:
        async with broker_process(directory, **settings) as broker:
            ready.set()
            begin = time.monotonic()
            learner = ScriptedLearner(context, broker.batch_endpoint, "s", train_s=0.2)
            await learner.run()
            seconds = time.monotonic() - begin
            assert [batch.index for batch, _ in learner.batches] == list(range(NUM_BATCHES))
            await asyncio.to_thread(done.wait, 60)
            assert await broker.terminate() == 0
        assert broker.count("lease_expired") == 0
        return seconds, lags_of(broker)
    finally:
        context.destroy(linger=0)


def lags_of(broker: BrokerProcess) -> list[float]:
    return [line["mean_lag"] for line in broker.events if line["event"] == "batch_assembled"]


async def site() -> tuple[int, int]:
    """The rollouts, until the end of the run. Returns how many chunks they sent, and made how many handshakes."""
    context = zmq.asyncio.Context()
    try:
        rollouts = [
            ScriptedRollout(context, f"tcp://{HOME}:{PORT}", f"rollout-paris-{number}", f"s{number}", capacity=8,
                action_tokens=ACTION_TOKENS, chunk_delay_s=CHUNK_S, security=ALLOWED)
            for number in range(NUM_ROLLOUTS)
        ]  # fmt: skip
        async with asyncio.TaskGroup() as tasks:
            for rollout in rollouts:
                tasks.create_task(rollout.run())
        return sum(len(each.chunks) for each in rollouts), sum(each.handshakes for each in rollouts)
    finally:
        context.destroy(linger=0)


def measured(directory: Path, delay_s: float, loss: float) -> Outcome:
    """A whole run with this distance between its broker and its rollouts."""
    directory.mkdir()
    ready, done = threading.Event(), threading.Event()
    ended: list[tuple[int, int]] = []

    def rollouts() -> None:
        try:
            assert ready.wait(120)
            ended.append(inside(far.site, lambda: asyncio.run(site())))
        finally:
            done.set()

    with far_apart(delay_s, loss) as far:
        thread = threading.Thread(target=rollouts)
        thread.start()
        seconds, lags = inside(far.home, lambda: asyncio.run(home(directory, ready, done)))
        thread.join()
        round_trip = inside(far.site, connecting_s)
        assert round_trip is None or round_trip >= 2 * delay_s
        counted, _ = far.line.communicate("", timeout=20)
    packets = json.loads(counted)
    return Outcome(seconds, lags, packets["sent"], packets["lost"], *ended[0])


def connecting_s() -> float | None:
    """Seconds until the home answers that nobody listens any more; None: it did not answer."""
    begin = time.monotonic()
    try:
        socket.create_connection((HOME, PORT), 10).close()
    except ConnectionRefusedError:
        return time.monotonic() - begin
    except OSError:
        return None
    return time.monotonic() - begin


def test_a_run_goes_on_with_rollouts_100_ms_away_over_a_line_that_loses_packets(tmp_path: Path) -> None:
    if os.geteuid() or shutil.which("ip") is None or not Path("/dev/net/tun").exists():
        pytest.skip("needs root, ip and /dev/net/tun: network namespaces")
    near = measured(tmp_path / "near", 0.0, 0.0)
    far = measured(tmp_path / "far", DELAY_S, LOSS)
    for name, outcome in (("near", near), ("far", far)):
        mean = sum(outcome.lags) / len(outcome.lags)
        print(
            f"{name}: {outcome.seconds:.1f} s, mean lag {mean:.2f}, {outcome.sent} packets, {outcome.lost} lost, "
            f"{outcome.chunks} chunks, {outcome.handshakes} handshakes"
        )
    print(f"far / near: {far.seconds / near.seconds:.2f} times the seconds")
    assert (near.lost, far.lost > 0) == (0, True)
    for path in (tmp_path / "near", tmp_path / "far"):
        report = audit_run(path / "run")
        assert report.problems == []
        assert report.dropped == {}
        assert report.num_batches == NUM_BATCHES
