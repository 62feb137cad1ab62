"""Weights sent by the learner straight into an engine, in a process group (gloo) of the two; chunks where that fails."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from prometheus_client import CollectorRegistry
from safetensors.torch import load_file

from protocol.channels import WEIGHTS
from protocol.messages import TensorInfo
from services.learner.metrics import LearnerMetrics
from services.learner.weights.process_groups import Bytes, GroupOptions, SendingGroup, SendingGroups
from services.learner.weights.server import WeightServer
from services.learner.weights.snapshot import Snapshot, SnapshotStore
from services.rollout.metrics import RolloutMetrics
from services.rollout.sglang.client import Engine
from services.rollout.weights.process_group import MAX_FAILURES, ReceivingGroup, buckets, host_of
from services.rollout.weights.sync import WeightSync
from services.rollout.weights.verify import verify_loaded
from services.runtime.clock import MonotonicClock
from services.runtime.net.authenticator import Authenticator
from services.runtime.net.channel import RouterChannel
from services.runtime.net.security import PLAINTEXT
from tests.integration.conftest import SglangServer
from tests.support.engines.scripted_engine import ScriptedEngine
from tests.support.learner.tiny_model import TINY_VOCAB_SIZE, checkpoint_tensors
from tests.support.processes.ports import free_ports
from tests.support.wire.snapshots import snapshot_of
from tests.support.wire.zmq_ends import ANY_PORT, in_background, zmq_context

PATIENCE_S = 60.0
GLOO = GroupOptions(backend="gloo", timeout_s=20.0, unasked_s=1.0)


class DeafGroup(SendingGroup):
    """Leaves the group when it is asked to send."""

    def send(self, data: Bytes) -> None:
        self.close()


class LaterDeafGroup(SendingGroup):
    """Sends version 1, and leaves when it is asked to send another."""

    def send(self, data: Bytes) -> None:
        if self.promised is not None and self.promised.policy_version > 1:
            self.close()
        else:
            super().send(data)


class UnaskedGroup(SendingGroup):
    """Never sends anything: the request was lost on its way."""

    def send(self, data: Bytes) -> None:
        return


class GoneGroup(SendingGroup):
    """Names a port at which nobody listens."""

    def __init__(self, options: GroupOptions) -> None:
        super().__init__(options)
        self.close()
        (self.port,) = free_ports(1)
        self._ended.clear()


class DamagingGroup(SendingGroup):
    """Sends other bytes than it is asked for."""

    def send(self, data: Bytes) -> None:
        damaged = data.copy()
        damaged[-1] ^= 1
        super().send(damaged)


class Follow:
    """A weight server, and a rollout's sync that may be in a group with it."""

    def __init__(self, context: Any, engine: Any, directory: Path, groups: SendingGroups | None, bucket_bytes: int) -> None:
        self.store = SnapshotStore()
        self.learner, self.rollout = CollectorRegistry(), CollectorRegistry()
        metrics = LearnerMetrics(self.learner)
        self.authenticator = Authenticator(context, PLAINTEXT, MonotonicClock(), metrics.authenticator_counters)
        channel = RouterChannel(context, WEIGHTS, ANY_PORT, self.authenticator)
        self.endpoint = channel.endpoint
        self.server = WeightServer(channel, self.store, metrics, groups=groups)
        self.sync = WeightSync(
            context=context,
            engine=engine,
            work_directory=directory,
            pause_mode="retract",
            peer="rollout-0",
            session="s",
            clock=MonotonicClock(),
            metrics=RolloutMetrics(self.rollout),
            retry_s=0.05,
            group=ReceivingGroup(engine, answer_s=20.0, bucket_bytes=bucket_bytes),
        )
        self._changed = asyncio.Event()
        self.sync.on_change(self._changed.set)

    def publish(self, snapshot: Snapshot) -> None:
        self.store.add(snapshot)
        self.sync.announce(snapshot.policy_version, self.endpoint)

    async def changed(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self._changed.wait()
        self._changed.clear()

    def fetches(self) -> dict[str, float | None]:
        name = "gspo_rollout_weight_fetches_total"
        return {kind: self.rollout.get_sample_value(name, {"kind": kind}) for kind in ("snapshot", "group")}

    def updates(self) -> dict[str, float | None]:
        name = "gspo_rollout_weight_updates_total"
        return {each: self.rollout.get_sample_value(name, {"outcome": each}) for each in ("loaded", "failed", "no_group")}

    @property
    def sent_bytes(self) -> float:
        return self.learner.get_sample_value("gspo_learner_weight_bytes_sent_total") or 0.0


@contextlib.asynccontextmanager
async def following(
    engine: Any, directory: Path, groups: SendingGroups | None, *, bucket_bytes: int = 100_000
) -> AsyncIterator[Follow]:
    async with zmq_context() as context:
        follow = Follow(context, engine, directory, groups, bucket_bytes)
        async with in_background(follow.authenticator.run(), follow.server.run(), follow.sync.run()):
            yield follow


@pytest_asyncio.fixture
async def engine(sglang_server: SglangServer) -> AsyncIterator[Engine]:
    """A client; afterwards the server holds its base checkpoint as version 0 again and is not paused."""
    async with Engine(sglang_server.url, vocab_size=TINY_VOCAB_SIZE) as client:
        yield client
        await client.pause()
        await client.update_weights_from_disk(sglang_server.base, 0)
        await client.resume()


def version_of(checkpoint: Path, version: int) -> Snapshot:
    return snapshot_of(version, load_file(checkpoint / "model.safetensors").items())


async def test_versions_reach_the_engine_through_one_group_and_nothing_is_fetched_or_written(
    engine: Engine, sglang_server: SglangServer, tmp_path: Path
) -> None:
    groups = SendingGroups(GLOO)
    async with following(engine, tmp_path / "work", groups) as follow:
        first = version_of(sglang_server.other, 1)
        follow.publish(first)
        await follow.changed()
        assert (follow.sync.policy_version, follow.sync.quarantined) == (1, "")
        assert await engine.weight_version() == 1
        assert (await verify_loaded(engine, checkpoint_tensors(sglang_server.other))).ok
        (group,) = groups._groups.values()
        follow.publish(version_of(sglang_server.base, 2))
        await follow.changed()
        assert (await verify_loaded(engine, checkpoint_tensors(sglang_server.base))).ok
        assert list(groups._groups.values()) == [group]
        assert follow.sync.may_generate.is_set()
        assert follow.fetches() == {"snapshot": 0, "group": 2}
        assert follow.updates() == {"loaded": 2, "failed": 0, "no_group": 0}
        assert follow.sent_bytes == 2 * first.manifest.num_bytes
        assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (DeafGroup, "Failed to receive weights"),
        (UnaskedGroup, "Failed to receive weights"),
        (DamagingGroup, "differ from what was sent"),
    ],
)
async def test_a_version_that_fails_in_the_group_is_not_served_and_comes_in_chunks(
    engine: Engine, sglang_server: SglangServer, tmp_path: Path, kind: type[SendingGroup], words: str
) -> None:
    groups = SendingGroups(GLOO, kind=kind)
    async with following(engine, tmp_path / "work", groups) as follow:
        follow.publish(version_of(sglang_server.other, 1))
        await follow.changed()
        assert follow.sync.policy_version == 0
        assert words in follow.sync.quarantined
        assert not follow.sync.may_generate.is_set()
        await follow.changed()
        assert (follow.sync.policy_version, follow.sync.quarantined) == (1, "")
        assert (await verify_loaded(engine, checkpoint_tensors(sglang_server.other))).ok
        assert follow.fetches() == {"snapshot": 1, "group": 0}
        assert follow.updates() == {"loaded": 1, "failed": 1, "no_group": 1}


async def test_a_learner_that_is_gone_before_it_has_sent_anything_does_not_stop_generation(
    engine: Engine, sglang_server: SglangServer, tmp_path: Path
) -> None:
    groups = SendingGroups(GLOO, kind=LaterDeafGroup)
    async with following(engine, tmp_path / "work", groups, bucket_bytes=2**30) as follow:
        follow.publish(version_of(sglang_server.other, 1))
        await follow.changed()
        follow.publish(version_of(sglang_server.base, 2))
        await follow.changed()
        # It was never out of service, and has fetched version 2 in chunks.
        assert (follow.sync.policy_version, follow.sync.quarantined) == (2, "")
        assert follow.sync.may_generate.is_set()
        assert follow.fetches() == {"snapshot": 1, "group": 1}
        assert follow.updates() == {"loaded": 2, "failed": 0, "no_group": 1}


async def test_an_update_that_a_killed_rollout_left_open_at_its_engine_does_no_harm(
    engine: Engine, sglang_server: SglangServer, tmp_path: Path
) -> None:
    await engine.control("/begin_weight_update", {}, timeout_s=PATIENCE_S)
    async with following(engine, tmp_path / "work", SendingGroups(GLOO)) as follow:
        follow.publish(version_of(sglang_server.other, 1))
        await follow.changed()
        assert (await verify_loaded(engine, checkpoint_tensors(sglang_server.other))).ok
        assert follow.fetches() == {"snapshot": 0, "group": 1}
        assert follow.updates() == {"loaded": 1, "failed": 0, "no_group": 0}


async def test_an_engine_is_not_sent_to_a_port_at_which_nobody_listens(tmp_path: Path) -> None:
    scripted = ScriptedEngine()  # It would fail if it were told to join a group.
    async with following(scripted, tmp_path / "work", SendingGroups(GLOO, kind=GoneGroup)) as follow:
        follow.publish(snapshot_of(1, [("model.norm.weight", torch.ones(8))]))
        await follow.changed()
        assert follow.sync.policy_version == 1
        assert follow.updates() == {"loaded": 1, "failed": 0, "no_group": 1}


async def test_a_learner_without_groups_is_asked_a_few_times_and_its_chunks_are_fetched(tmp_path: Path) -> None:
    scripted = ScriptedEngine()
    async with following(scripted, tmp_path / "work", None) as follow:
        for version in range(1, MAX_FAILURES + 3):
            follow.publish(snapshot_of(version, [("model.norm.weight", torch.full((8,), float(version)))]))
            await follow.changed()
            assert follow.sync.policy_version == version
        assert follow.updates() == {"loaded": MAX_FAILURES + 2, "failed": 0, "no_group": MAX_FAILURES}
        assert scripted.calls[:3] == ["pause retract", "update 1", "resume"]


async def test_a_group_that_nobody_joins_ends_by_itself() -> None:
    group = SendingGroup(GroupOptions(backend="gloo", timeout_s=0.1))
    async with asyncio.timeout(PATIENCE_S):
        while not group.ended:  # noqa: ASYNC110 - it is another thread's
            await asyncio.sleep(0.01)
    assert SendingGroups(GLOO).get(b"r", group.name) is None


def test_tensors_are_received_in_order_and_in_buckets_that_are_not_too_large() -> None:
    sizes = [3, 4, 9, 1, 1]
    tensors = [TensorInfo(f"t{at}", "float32", [size], 0, size, "0" * 64) for at, size in enumerate(sizes)]
    cut = list(buckets(tensors, 7))
    assert [[each.num_bytes for each in bucket] for bucket in cut] == [[3, 4], [9], [1, 1]]
    assert [each for bucket in cut for each in bucket] == tensors
    assert list(buckets([], 7)) == []


def test_the_group_is_at_the_host_of_the_weights() -> None:
    assert host_of("tcp://learner-0.gspo:7003") == "learner-0.gspo"
    assert host_of("tcp://[::1]:7003") == "::1"
    assert host_of("ipc:///tmp/weights") == "127.0.0.1"
