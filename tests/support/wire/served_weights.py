"""A real weight server, and versions of every type and shape that is served."""

import contextlib
from collections.abc import AsyncIterator

import msgspec
import torch
import zmq.asyncio
from prometheus_client import CollectorRegistry

from gspo_protocol.channels import WEIGHTS
from gspo_services.learner.metrics import LearnerMetrics
from gspo_services.learner.weights.delta import encode_delta
from gspo_services.learner.weights.snapshot import Delta, Snapshot, SnapshotStore
from gspo_services.learner.weights.weight_server import WeightServer
from gspo_services.rollout.weights.chunks import WINDOW_CHUNKS
from gspo_services.shared.net.authenticator import Authenticator
from gspo_services.shared.net.channel import RouterChannel
from gspo_services.shared.net.peer import PeerClient
from gspo_services.shared.net.security import PLAINTEXT, Security
from gspo_services.shared.runtime.clock import MonotonicClock
from tests.support.wire.snapshots import snapshot_of
from tests.support.wire.zmq_ends import ANY_PORT, a_client, in_background, zmq_context

SOON_S = 0.3
"""Tests give up after this silence, which is far longer than an answer takes on a busy machine."""


def weights(seed: int = 0, *, big: bool = False) -> dict[str, torch.Tensor]:
    """Tensors of every type and shape that is served; ``big``: more than one window of chunks."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "model.embed_tokens.weight": torch.randn(64, 32, generator=generator),
        "model.layers.0.input_layernorm.weight": torch.randn(32, generator=generator).to(torch.bfloat16),
        "model.layers.0.mlp.experts.3.down_proj.weight": torch.randn(7, 5, generator=generator).to(torch.float16),
        "model.layers.0.mlp.gate.weight": torch.randn(3, 3, generator=generator).t(),
        "model.norm.weight": torch.tensor(0.5),
    }
    if big:
        tensors["model.layers.1.big.weight"] = torch.randn(WINDOW_CHUNKS + 2, 512, 511, generator=generator)
    return tensors


def a_snapshot(version: int = 1, *, big: bool = False, chunk_bytes: int | None = None) -> Snapshot:
    snapshot = snapshot_of(version, weights(version, big=big).items())
    if chunk_bytes is None:
        return snapshot
    manifest = msgspec.structs.replace(snapshot.manifest, chunk_bytes=chunk_bytes)
    return Snapshot(manifest=manifest, weights=snapshot.weights)


class Served:
    """A real weight server and its counts."""

    def __init__(
        self, context: zmq.asyncio.Context, store: SnapshotStore | None = None, security: Security = PLAINTEXT
    ) -> None:
        self.store = SnapshotStore() if store is None else store
        self.registry = CollectorRegistry()
        metrics = LearnerMetrics(self.registry)
        self.authenticator = Authenticator(context, security, MonotonicClock(), metrics.authenticator_counters)
        self.channel = RouterChannel(context, WEIGHTS, ANY_PORT, self.authenticator)
        self.endpoint = self.channel.endpoint
        self.server = WeightServer(self.channel, self.store, metrics)

    def count(self, name: str, **labels: str) -> float:
        value = self.registry.get_sample_value(f"gspo_learner_{name}_total", labels)
        return 0.0 if value is None else value


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[tuple[Served, PeerClient]]:
    async with zmq_context() as context:
        server = Served(context)
        client = a_client(context, WEIGHTS, server.endpoint)
        async with in_background(server.authenticator.run(), server.server.run(), client.run()):
            await client.connected_welcome()
            yield server, client


def stepped(former: dict[str, torch.Tensor], seed: int, num_changed: int = 40) -> dict[str, torch.Tensor]:
    """One optimizer step further: a few elements of each tensor move, most of them by one step of their type."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, tensor in former.items():
        bits = tensor.detach().clone().contiguous().view(torch.int32 if tensor.dtype.itemsize == 4 else torch.int16)
        flat = bits.view(-1)
        chosen = torch.randperm(len(flat), generator=generator)[:num_changed]
        steps = torch.tensor([-1, 1, 1, -1, 700])[torch.randint(0, 5, (len(chosen),), generator=generator)]
        flat[chosen] += steps.to(flat.dtype)
        tensors[name] = bits.view(tensor.dtype)
    return tensors


def start() -> dict[str, torch.Tensor]:
    """Names that an engine of any number of experts knows."""
    tensors = {name: tensor for name, tensor in weights(0).items() if "experts" not in name}
    return {**tensors, "model.big.weight": torch.zeros(300, 500, dtype=torch.bfloat16)}


class Publisher:
    """Publishes step after step, as a learner does; ``damage`` flips a bit of the next delta that it serves."""

    def __init__(self, server: Served) -> None:
        self.served = server
        self._tensors = start()
        self.version = 0
        self.damage = False

    def publish(self, *, skip: int = 0) -> Snapshot:
        """``skip``: version numbers that no version gets."""
        self.version += 1 + skip
        self._tensors = stepped(self._tensors, self.version)
        snapshot, newest = snapshot_of(self.version, self._tensors.items()), self.served.store.newest
        delta = None if newest is None else encode_delta(newest, snapshot)
        assert newest is None or delta is not None
        if delta is not None and self.damage:
            data = delta.data.copy()
            data[-20] ^= 4
            delta = Delta(manifest=delta.manifest, data=data)
        self.damage = False
        self.served.store.add(snapshot, delta)
        return snapshot
