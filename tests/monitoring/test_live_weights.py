"""A real Prometheus beside a real broker, weight server and rollout; weights arrive damaged or load wrongly."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import zmq.asyncio
from prometheus_client import CollectorRegistry

from gspo_protocol.channels import BATCH, WEIGHTS, WORK
from gspo_protocol.messages import Published, TensorInfo
from gspo_services.learner.metrics import LearnerMetrics
from gspo_services.learner.weights.snapshot import SnapshotStore
from gspo_services.learner.weights.weight_server import WeightServer
from gspo_services.rollout.metrics import RolloutMetrics
from gspo_services.rollout.service import RolloutService
from gspo_services.rollout.tokenizer import ChatTokenizer
from gspo_services.rollout.weights.sync import WeightSync
from gspo_services.shared.net.channel import RouterChannel
from gspo_services.shared.net.peer import PeerClient
from gspo_services.shared.runtime.clock import MonotonicClock
from gspo_services.shared.runtime.telemetry import Health, TelemetryServer
from gspo_services.shared.settings.sections import Rollout
from gspo_services.shared.weights.chunk_server import Parts, StoredParts
from tests.monitoring.server import PrometheusServer
from tests.support.broker.process import BrokerProcess, broker_process
from tests.support.engines.chat_models import TINY_TEMPLATE, chat_tokenizer, save_chat_model
from tests.support.engines.scripted_engine import ScriptedEngine
from tests.support.episodes import an_environment_loop
from tests.support.wire.snapshots import snapshot_of
from tests.support.wire.zmq_ends import ANY_PORT, in_background, zmq_context

pytestmark = pytest.mark.monitoring
MODEL = {"model.norm.weight": torch.tensor([0.5, 0.25])}


def flip_a_bit(loaded: dict[str, tuple[TensorInfo, bytes]]) -> None:
    for name, (info, data) in loaded.items():
        loaded[name] = (info, bytes([data[0] ^ 1]) + data[1:])


class FlippingStore(SnapshotStore):
    """A store in which the next ``num_wrong`` versions that are fetched have one wrong bit."""

    num_wrong = 0

    def get(self, policy_version: int, base_version: int = 0) -> Parts | None:
        parts = super().get(policy_version, base_version)
        if parts is None or not self.num_wrong:
            return parts
        self.num_wrong -= 1
        data = parts.read(0, parts.manifest.num_bytes).copy()
        data[0] ^= 1
        return StoredParts(manifest=parts.manifest, data=data)


class Fleet:
    """The learner's weight server and one rollout, each with its own metrics port."""

    def __init__(
        self, stack: ExitStack, context: zmq.asyncio.Context, broker: BrokerProcess, directory: Path, retry_s: float
    ) -> None:
        self.clock = MonotonicClock()
        self.engine = ScriptedEngine()
        learner, rollout = CollectorRegistry(), CollectorRegistry()
        self.store = FlippingStore()
        channel = RouterChannel(context, WEIGHTS, ANY_PORT)
        self.endpoint = channel.endpoint
        self.server = WeightServer(channel, self.store, LearnerMetrics(learner))
        metrics, health = RolloutMetrics(rollout), Health(self.clock, 60)
        self.learner = PeerClient(
            context, BATCH, broker.batch_endpoint, role="learner", peer="learner", session="l", clock=self.clock
        )
        self.client = PeerClient(
            context, WORK, broker.work_endpoint, role="rollout", peer="rollout-0", session="r", clock=self.clock
        )
        sync = WeightSync(
            context=context,
            engine=self.engine,  # type: ignore[arg-type]
            work_directory=directory,
            pause_mode="retract",
            peer="rollout-0",
            session="r",
            clock=self.clock,
            metrics=metrics,
            retry_s=retry_s,
        )
        model = save_chat_model(directory / "model", chat_tokenizer(TINY_TEMPLATE, "<|end|>"))
        loop = an_environment_loop(
            ChatTokenizer(model),
            engine=self.engine,
            broker=self.client,
            may_generate=sync.may_generate,
            metrics=metrics,
            any_task=True,
        )
        self.rollout = RolloutService(
            episodes=loop,
            broker=self.client,
            sync=sync,
            settings=Rollout(),
            clock=self.clock,
            health=health,
            metrics=metrics,
        )
        self.ports = {
            name: stack.enter_context(TelemetryServer("127.0.0.1", 0, registry, Health(self.clock, 60))).port
            for name, registry in (("learner", learner), ("rollout", rollout))
        }

    async def publish(self, version: int) -> None:
        snapshot = snapshot_of(version, MODEL.items())
        self.store.add(snapshot)
        announcement = Published(
            policy_version=version,
            endpoint=self.endpoint,
            digest=snapshot.manifest.digest,
            num_bytes=snapshot.manifest.num_bytes,
            trained_batches=0,
            vocabulary=1000,
        )
        await self.learner.send(announcement)


@contextlib.asynccontextmanager
async def fleet(tmp_path: Path, retry_s: float) -> AsyncIterator[tuple[Fleet, PrometheusServer]]:
    async with broker_process(tmp_path) as broker, zmq_context() as context:
        with ExitStack() as stack:
            made = Fleet(stack, context, broker, tmp_path, retry_s)
            targets = {
                "broker": ("broker", broker.metrics_port),
                "learner": ("learner", made.ports["learner"]),
                "rollout-0": ("rollout", made.ports["rollout"]),
            }
            prometheus = stack.enter_context(PrometheusServer(tmp_path / "prometheus", targets))
            async with in_background(made.server.run(), made.learner.run(), made.rollout.run(asyncio.Event())):
                await made.learner.connected_welcome()
                yield made, prometheus


async def test_an_engine_with_other_weights_than_it_was_sent_is_quarantined_and_the_alerts_say_so(tmp_path: Path) -> None:
    # It does not try again: after its third failure the process would end, which is another alert.
    async with fleet(tmp_path, retry_s=3600) as (run, prometheus):
        await run.publish(1)
        serving = 'gspo_broker_rollouts{status="serving"} == 1'
        await asyncio.to_thread(prometheus.wait_until, "serving", lambda: prometheus.value(serving) == 1, 60)
        assert {"GspoWeightUpdatesFail", "GspoEngineQuarantined"}.isdisjoint(await asyncio.to_thread(prometheus.firing))
        # A counter that was never seen at 0 does not increase.
        none = "gspo_learner_weight_loads_failed_total == 0"
        await asyncio.to_thread(prometheus.wait_until, "the learner's metrics", lambda: prometheus.value(none) == 0, 60)
        run.engine.damage = flip_a_bit
        await run.publish(2)
        failed = await asyncio.to_thread(prometheus.wait_firing, "GspoWeightUpdatesFail")
        assert failed["labels"]["component"] == "learner"
        assert "an engine did not hold what was sent" in failed["annotations"]["description"]
        quarantined = await asyncio.to_thread(prometheus.wait_firing, "GspoEngineQuarantined")
        assert quarantined["annotations"]["summary"] == "1 rollouts are quarantined"
        await asyncio.to_thread(prometheus.wait_firing, "GspoNoRollouts")
        assert prometheus.value('gspo_rollout_status{status="quarantined",pod="rollout-0"}') == 1


async def test_weights_that_arrive_damaged_twice_are_reported_and_served_the_third_time(tmp_path: Path) -> None:
    async with fleet(tmp_path, retry_s=0.1) as (run, prometheus):
        await run.publish(1)
        serving = 'gspo_broker_rollouts{status="serving"} == 1'
        await asyncio.to_thread(prometheus.wait_until, "serving", lambda: prometheus.value(serving) == 1, 60)
        assert "GspoWeightsDamaged" not in await asyncio.to_thread(prometheus.firing)
        none = "gspo_rollout_weights_damaged_total == 0"
        await asyncio.to_thread(prometheus.wait_until, "the rollout's metrics", lambda: prometheus.value(none) == 0, 60)
        run.store.num_wrong = 2
        await run.publish(2)
        damaged = await asyncio.to_thread(prometheus.wait_firing, "GspoWeightsDamaged")
        assert "a version arrived that differed from what the learner published" in damaged["annotations"]["description"]
        second = "gspo_rollout_policy_version == 2"
        await asyncio.to_thread(prometheus.wait_until, "version 2", lambda: prometheus.value(second) == 2, 60)
        assert prometheus.value("gspo_rollout_weights_damaged_total") == 2
        assert prometheus.value('gspo_rollout_weight_fetches_total{kind="snapshot"}') == 2
