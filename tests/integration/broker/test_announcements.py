"""What the broker sends to all rollouts at once: each of them gets it, and it is encoded once."""

import asyncio
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq.asyncio

from gspo_protocol.codec import decode, encode
from gspo_protocol.limits import PROTOCOL_VERSION
from gspo_protocol.messages import Hello, Message, Published, Pulse, Role, Welcome
from gspo_services.broker.entry import run_broker
from gspo_services.shared.settings import Settings
from tests.support.processes.ports import free_port
from tests.support.wire.zmq_ends import PATIENCE_S, in_background, zmq_context

NUM_ROLLOUTS = 5


async def a_peer(context: zmq.asyncio.Context, endpoint: str, role: Role, name: str) -> zmq.asyncio.Socket:
    """A DEALER that the broker has welcomed."""
    peer = context.socket(zmq.DEALER)
    peer.connect(endpoint)
    await peer.send_multipart(encode(Hello(protocol_version=PROTOCOL_VERSION, role=role, peer=name, session="s")))
    assert isinstance(await received(peer), Welcome)
    return peer


async def received(peer: zmq.asyncio.Socket) -> Message:
    async with asyncio.timeout(PATIENCE_S):
        return decode(await peer.recv_multipart()).message


async def test_a_new_version_is_announced_to_every_rollout_and_encoded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[str] = []
    pack = msgpack.packb

    def counting(value: Any, **options: Any) -> bytes:
        encoded.append(value["m"]["type"])
        return pack(value, **options)

    work, batch = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    settings = Settings.model_validate(
        {
            "run": {"directory": str(tmp_path / "run")},
            "broker": {"work_endpoint": work, "batch_endpoint": batch, "metrics_port": 0},
        }
    )
    async with zmq_context() as context, in_background(run_broker(settings, asyncio.Event())):
        rollouts = [await a_peer(context, work, "rollout", f"rollout-{number}") for number in range(NUM_ROLLOUTS)]
        learner = await a_peer(context, batch, "learner", "learner")
        published = Published(
            policy_version=1, endpoint="tcp://w:1", digest="d", num_bytes=1, trained_batches=0, vocabulary=9
        )
        frames = encode(published, seq=0)
        monkeypatch.setattr(msgpack, "packb", counting)
        await learner.send_multipart(frames)
        pulses = [await received(rollout) for rollout in rollouts]
    assert pulses == [Pulse(policy_version=1, weights_endpoint="tcp://w:1")] * NUM_ROLLOUTS
    assert encoded.count("pulse") == 1
