"""A learner on two machines: ``gspo learner`` twice, as processes of this one, and a scripted broker."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
import threading
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import httpx
import pytest
import torch
import zmq.asyncio
from safetensors.torch import load_file

from gspo_protocol.channels import BATCH, WEIGHTS
from gspo_protocol.messages import Checkpointed, Resume, Trained
from gspo_services.learner.checkpoints.format import read_metadata
from gspo_services.learner.checkpoints.state_files import TensorDirectory
from gspo_services.rollout.weights.fetch import fetch_newest
from gspo_services.rollout.weights.replica import Replica
from tests.support.broker.giving_broker import GivingBroker
from tests.support.learner.checkpoints import find_latest
from tests.support.learner.tiny_model import save_tiny_model
from tests.support.processes.ports import free_ports
from tests.support.wire.zmq_ends import ANY_PORT, ScriptedEnd, a_client, in_background, zmq_context

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1000)]

PATIENCE_S = 250.0
ALONE_S = 60.0
"""A launcher kills ranks that do not stop after ten minutes."""
POLL_S = 0.2
SERVED = "weights-00000.safetensors"
CONFIG = """
[run]
directory = "{directory}/run"
[model]
path = "{directory}/model"
[batch]
group_size = 2
groups_per_batch = 4
mini_batches = 2
[broker]
batch_endpoint = "{broker}"
[learner]
num_nodes = 2
rendezvous_address = "127.0.0.1:{port}"
zero_stage = 3
expert_parallel = 2
collective_timeout_s = 60
checkpoint_every_batches = 2
metrics_port = 0
weights_endpoint = "{weights}"
"""


def configure(work: Path, broker: str) -> tuple[int, str]:
    """Write model and run.toml. Returns the port where the ranks meet, and where the weights are served."""
    save_tiny_model(work / "model")
    port, weights_port = free_ports(2)
    weights = f"tcp://127.0.0.1:{weights_port}"
    content = CONFIG.format(directory=work, broker=broker, weights=weights, port=port)
    (work / "run.toml").write_text(content, encoding="utf-8")
    return port, weights


@contextlib.asynccontextmanager
async def started(
    work: Path, name: str, nodes: Sequence[int] = (0, 1), settings: Sequence[str] = ()
) -> AsyncIterator[list[Process]]:
    """``gspo learner`` on both machines; their output goes to NAME-0.log and NAME-1.log."""
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "gspo_services.learner", str(work / "run.toml")]
    command += [word for setting in settings for word in ("--set", setting)]
    agents: list[Process] = []
    try:
        for node in nodes:
            # Two machines have this port twice.
            own = ["--set", "learner.weights_endpoint=tcp://127.0.0.1:*"] if node else []
            with (work / f"{name}-{node}.log").open("wb") as output:
                agents.append(
                    await asyncio.create_subprocess_exec(
                        *command, *own, "--set", f"learner.node_rank={node}", env=environment, stdout=output, stderr=output
                    )
                )
        yield agents
    finally:
        for agent in agents:
            if agent.returncode is None:
                agent.kill()
            await agent.wait()


async def fetch(context: zmq.asyncio.Context, endpoint: str, directory: Path) -> None:
    """Fetch the newest weights and write them for an engine, as a rollout does."""
    client = a_client(context, WEIGHTS, endpoint)
    async with in_background(client.run()):
        await client.connected_welcome()
        fetched = await fetch_newest(client, 0, Replica(directory / "copy"))
    assert fetched is not None
    fetched.files.link(directory, fetched.unloaded())


def require_served(served: Path, checkpoints: Path) -> None:
    """The served weights are bit for bit those that both nodes then saved."""
    latest = find_latest(checkpoints)
    assert latest is not None
    saved = TensorDirectory(latest / "engine")
    tensors = load_file(served)
    assert len(tensors) == 2 * (4 + 2 + 2 + 1 + 4 * 3) + 3
    for name, tensor in tensors.items():
        expert = re.fullmatch(r"(.+\.mlp\.experts)\.(\d+)\.(\w+)\.weight", name)
        if expert is None:
            assert torch.equal(saved.read(f"{name}/weight", 0, tensor.shape[0], tuple(tensor.shape)), tensor), name
        else:
            key = f"{expert[1]}.{expert[3]}/weight"
            assert torch.equal(saved.read(key, int(expert[2]), 1, (1, *tensor.shape))[0], tensor), name


@pytest.mark.timeout(900)
async def test_a_learner_on_two_nodes_trains_saves_survives_the_loss_of_one_and_stops_when_one_is_asked(
    tmp_path: Path,
) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    async with zmq_context() as context:
        end = ScriptedEnd(context, BATCH, ANY_PORT)
        _, weights = configure(tmp_path, end.endpoint)
        broker = GivingBroker(end)
        async with in_background(broker.serve()):
            async with started(tmp_path, "first") as (first, second):
                await broker.until(lambda told: sum(isinstance(message, Trained) for message in told) == 3)
                second.kill()
                async with asyncio.timeout(PATIENCE_S):
                    assert await first.wait() == 1
            output = (tmp_path / "first-0.log").read_text(encoding="utf-8")
            assert "rank 0 lost another rank in a collective (" in output
            assert "start the learner again, it resumes from its last checkpoint" in output
            latest = find_latest(checkpoints)
            assert latest is not None
            metadata = read_metadata(latest)
            # The third batch was trained after the checkpoint, and is trained again.
            assert metadata["state"]["batch_position"] == 2
            # Each node writes one file for its half of every slab.
            assert sum(name.endswith("0-of-2.safetensors") for name in metadata["files"]) == 2 * 3
            assert sum(name.endswith("1-of-2.safetensors") for name in metadata["files"]) == 2 * 3

            broker.told.clear()
            async with started(tmp_path, "again") as (first, second):
                await broker.until(lambda told: any(isinstance(message, Trained) for message in told))
                await fetch(context, weights, tmp_path / "served")
                second.send_signal(signal.SIGTERM)
                async with asyncio.timeout(PATIENCE_S):
                    statuses = [await agent.wait() for agent in (first, second)]
            assert statuses == [0, 0]
    assert Resume(next_batch=2) in broker.told
    assert [message.index for message in broker.told if isinstance(message, Trained)] == [2]
    assert any(isinstance(message, Checkpointed) and message.next_batch == 3 for message in broker.told)
    require_served(tmp_path / "served" / SERVED, checkpoints)


async def test_a_machine_that_waits_for_the_others_ends_when_asked_to_stop(tmp_path: Path) -> None:
    port, _ = configure(tmp_path, "tcp://127.0.0.1:9")
    async with started(tmp_path, "alone", [0]) as (first,):
        # Rank 0 opens the rendezvous and waits there.
        await wait_until("rendezvous", lambda: listens(port))
        first.send_signal(signal.SIGTERM)
        async with asyncio.timeout(ALONE_S):
            assert await first.wait() == 0


async def test_after_the_end_both_machines_stay_until_one_is_asked_to_stop_and_answer_their_probes(tmp_path: Path) -> None:
    """If a machine's ranks ended, it would be started again and meet nobody."""
    async with zmq_context() as context:
        end = ScriptedEnd(context, BATCH, ANY_PORT)
        port, weights = configure(tmp_path, end.endpoint)
        broker = GivingBroker(end)
        broker.last, broker.ends = -1, True
        (health,) = free_ports(1)
        page = f"http://127.0.0.1:{health}"
        async with (
            in_background(broker.serve()),
            started(tmp_path, "run", [1], [f"learner.metrics_port={health}"]) as (second,),
        ):
            reason = f"waiting for rank 0 at 127.0.0.1:{port}\n"
            await wait_until("its reason", lambda: answer(f"{page}/readyz") == (503, reason))
            assert answer(f"{page}/healthz") == (200, "alive\n")
            async with started(tmp_path, "run", [0]) as (first,):
                await wait_until("end", lambda: "run_complete" in (tmp_path / "run-0.log").read_text(encoding="utf-8"))
                await fetch(context, weights, tmp_path / "served")
                assert answer(f"{page}/readyz") == (200, "ready\n")
                assert answer(f"{page}/metrics") == (200, ""), "the learner's metrics are those of rank 0"
                second.send_signal(signal.SIGTERM)
                async with asyncio.timeout(PATIENCE_S):
                    assert [await agent.wait() for agent in (first, second)] == [0, 0]


def answer(url: str) -> tuple[int, str]:
    """Status and text; (0, reason) without an answer."""
    try:
        got = httpx.get(url, timeout=5.0, trust_env=False)
    except httpx.TransportError as error:
        return 0, str(error)
    return got.status_code, got.text


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def wait_until(what: str, condition: Callable[[], bool]) -> None:
    """Wait for ``condition``. Raises: AssertionError when it does not become true."""

    def wait() -> None:
        for _ in range(int(PATIENCE_S / POLL_S)):
            if condition():
                return
            threading.Event().wait(POLL_S)
        raise AssertionError(f"no {what} within {PATIENCE_S:.0f} s")

    await asyncio.to_thread(wait)
