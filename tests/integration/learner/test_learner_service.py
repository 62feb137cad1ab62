"""The training loop between a scripted broker and an engine that is a table of logits."""

import asyncio
import contextlib
import math
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry

from gspo_protocol.channels import BATCH
from gspo_protocol.messages import (
    BatchFailed,
    BatchRequest,
    Checkpointed,
    Evaluated,
    Message,
    Published,
    Resume,
    SkipBatch,
    Trained,
    VersionScore,
)
from gspo_services.learner.broker.thread import BrokerThread
from gspo_services.learner.checkpoints.versions import Versions
from gspo_services.learner.metrics import LearnerMetrics
from gspo_services.learner.service import LearnerService
from gspo_services.shared.runtime.clock import MonotonicClock
from gspo_services.shared.runtime.telemetry import Health
from gspo_services.shared.settings.sections import BatchSection, Broker, Learner, ObjectiveSettings, Run, Settings
from tests.support.learner.checkpoints import newest_given
from tests.support.learner.scripted_broker import a_training_batch, send_batch
from tests.support.learner.serving_bigram import ServingBigram
from tests.support.wire.zmq_ends import ANY_PORT, ScriptedEnd, a_welcome, in_background, zmq_context

PLAIN = ObjectiveSettings()
REPORTS = (BatchFailed, Published, Checkpointed, Trained, Resume, BatchRequest)


class Training:
    """A LearnerService in a thread, and the broker's end of its connection."""

    def __init__(self, end: ScriptedEnd, directory: Path, objective: ObjectiveSettings) -> None:
        settings = Settings(
            run=Run(directory=directory),
            objective=objective,
            batch=BatchSection(group_size=2, groups_per_batch=4, mini_batches=2),
            broker=Broker(batch_endpoint=end.endpoint),
            learner=Learner(weights_endpoint=ANY_PORT, checkpoint_every_batches=2),
        )
        clock, self.registry = MonotonicClock(), CollectorRegistry()
        metrics, self.health = LearnerMetrics(self.registry), Health(clock, 60.0)
        self.stop = threading.Event()
        self.engine = ServingBigram()
        self.end = end
        self._broker = BrokerThread(settings, session="s", clock=clock, health=self.health, metrics=metrics)
        self._parts = (settings, clock, metrics)
        self._asked: BatchRequest | None = None

    def run(self) -> None:
        settings, clock, metrics = self._parts
        with self._broker as broker:
            LearnerService(
                settings,
                self.engine,  # type: ignore[arg-type]
                broker,
                clock=clock,
                health=self.health,
                metrics=metrics,
                stop=self.stop,
            ).run()

    async def take(self, kind: type[Message]) -> Message:
        """Acknowledge the next report, which must be of this kind, and return it. Requests are repeated and may come while a
        version is still being announced: they are kept until they are wanted."""
        if kind is BatchRequest and self._asked is not None:
            asked, self._asked = self._asked, None
            return asked
        while True:
            received = await self.end.receive()
            if received.seq is not None:
                await self.end.acknowledge(received)
            if isinstance(received.message, BatchRequest) and kind is not BatchRequest:
                self._asked = received.message
            elif isinstance(received.message, REPORTS):
                assert isinstance(received.message, kind), received.message
                return received.message

    async def acknowledge_all(self) -> None:
        while True:
            received = await self.end.receive()
            if received.seq is not None:
                await self.end.acknowledge(received)

    async def train(self, index: int, policy_version: int, made_at: int | None = None) -> None:
        """Answer the request for a batch. ``made_at``: the version of a batch that was made before; a broker keeps it."""
        while await self.take(BatchRequest) != BatchRequest(index=index, policy_version=policy_version):
            pass
        await send_batch(self.end, a_training_batch(index, policy_version if made_at is None else made_at))


@contextlib.asynccontextmanager
async def training(
    directory: Path, broker_version: int, objective: ObjectiveSettings = PLAIN, **welcome: object
) -> AsyncIterator[Training]:
    """Runs until the block ends, then is stopped and must end by itself."""
    async with zmq_context() as context:
        learner = Training(ScriptedEnd(context, BATCH), directory, objective)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(asyncio.to_thread(learner.run))
            try:
                await learner.end.welcome(policy_version=broker_version, **welcome)
                yield learner
            finally:
                learner.stop.set()
            async with in_background(learner.acknowledge_all()):
                await running


async def test_batches_become_versions_reports_and_checkpoints_in_order(tmp_path: Path) -> None:
    async with training(tmp_path, broker_version=0) as learner:
        assert await learner.take(Resume) == Resume(next_batch=0)
        first = await learner.take(Published)
        assert isinstance(first, Published)
        assert (first.policy_version, first.trained_batches) == (1, 0)
        assert (first.vocabulary, first.experts) == (learner.engine.vocabulary, learner.engine.model_experts)
        before = learner.engine.table.detach().clone()

        await learner.train(0, 1)
        published = await learner.take(Published)
        assert isinstance(published, Published)
        assert (published.policy_version, published.trained_batches) == (2, 1)
        assert not torch.equal(before, learner.engine.table.detach())
        trained = await learner.take(Trained)
        assert isinstance(trained, Trained)
        assert (trained.index, trained.policy_version) == (0, 2)
        assert trained.metrics["optimizer_steps"] == 2
        assert len(learner.engine.gradients) == 2

        await learner.train(1, 2)
        assert (await learner.take(Published)).policy_version == 3  # type: ignore[attr-defined]
        assert (await learner.take(Trained)).index == 1  # type: ignore[attr-defined]
        assert await learner.take(Checkpointed) == Checkpointed(next_batch=2, policy_version=3)
        await learner.take(BatchRequest)
        assert learner.health.ready()[0]
    assert learner.registry.get_sample_value("gspo_learner_batches_total") == 2
    assert learner.registry.get_sample_value("gspo_learner_tokens_total") == 96


async def test_a_stopped_learner_saves_its_state_and_tells_the_broker_before_it_ends(tmp_path: Path) -> None:
    async with training(tmp_path, broker_version=0) as learner:
        await learner.take(Resume)
        await learner.take(Published)
        await learner.train(0, 1)
        newest = await learner.take(Published)
        assert isinstance(newest, Published)
        await learner.take(Trained)
        learner.stop.set()
        assert await learner.take(Checkpointed) == Checkpointed(next_batch=1, policy_version=2)
        table = learner.engine.table.detach().clone()

    async with training(tmp_path, 2, trained_batches=1, weights_digest=newest.digest) as again:
        assert await again.take(Resume) == Resume(next_batch=1)
        published = await again.take(Published)
        assert isinstance(published, Published)
        assert (published.policy_version, published.trained_batches) == (2, 1), "an orderly restart changes no version"
        assert torch.equal(again.engine.table.detach(), table)
        assert await again.take(BatchRequest) == BatchRequest(index=1, policy_version=2)


async def test_the_checkpoint_of_the_best_version_outlives_newer_ones(tmp_path: Path) -> None:
    async with training(tmp_path, broker_version=0) as learner:
        await learner.take(Resume)
        await learner.take(Published)
        await learner.end.reply(Evaluated(scores=[VersionScore(3, False, 0.75), VersionScore(5, False, 0.5)]))
        for index in range(8):
            await learner.train(index, index + 1)
            await learner.take(Published)
            await learner.take(Trained)
            if index % 2:
                await learner.take(Checkpointed)
    there = sorted(path.name for path in (tmp_path / "checkpoints").glob("version-*"))
    assert [int(name.split("-")[1]) for name in there] == [3, 7, 9]


async def test_the_scale_of_an_adaptive_clip_survives_a_restart(tmp_path: Path) -> None:
    objective = ObjectiveSettings(adaptive_clip_target=0.01, anchor="behaviour")

    async def scale_of_batch(learner: Training, index: int, version: int) -> float | None:
        await learner.train(index, version)
        await learner.take(Published)
        trained = await learner.take(Trained)
        assert isinstance(trained, Trained)
        return trained.metrics["clip_scale"]

    async with training(tmp_path, 0, objective) as learner:
        await learner.take(Resume)
        await learner.take(Published)
        assert await scale_of_batch(learner, 0, 1) == 1.0
        learner.stop.set()
        await learner.take(Checkpointed)
    async with training(tmp_path, 2, objective) as again:
        await again.take(Resume)
        await again.take(Published)
        # More than twice the target was clipped, so that it took a full step.
        assert await scale_of_batch(again, 1, 3) == pytest.approx(math.exp(0.2))
    gauge = again.registry.get_sample_value("gspo_learner_diagnostic", {"name": "clip_scale", "bucket": ""})
    assert gauge == pytest.approx(math.exp(0.2))


async def test_a_run_without_an_adaptive_clip_resumes_from_one_with_it_and_vice_versa(tmp_path: Path) -> None:
    for version, objective in enumerate((PLAIN, ObjectiveSettings(adaptive_clip_target=0.1), PLAIN)):
        async with training(tmp_path, version, objective) as learner:
            await learner.take(Resume)
            await learner.take(Published)
            learner.stop.set()


async def test_weights_keep_their_number_when_the_broker_has_forgotten_it(tmp_path: Path) -> None:
    async with training(tmp_path, broker_version=40) as learner:
        await learner.take(Resume)
        assert (await learner.take(Published)).policy_version == 41  # type: ignore[attr-defined]
        await learner.take(BatchRequest)
        learner.stop.set()
        assert await learner.take(Checkpointed) == Checkpointed(next_batch=0, policy_version=41)
    async with training(tmp_path, broker_version=0) as again:
        await again.take(Resume)
        assert (await again.take(Published)).policy_version == 41  # type: ignore[attr-defined]
        await again.train(0, 41)
        assert (await again.take(Published)).policy_version == 42  # type: ignore[attr-defined]
        await again.take(Trained)


async def test_a_version_that_only_an_engine_has_seen_is_not_given_to_other_weights(tmp_path: Path) -> None:
    """The learner is killed after an engine has fetched version 7 and before the broker has committed it."""
    former = Versions(tmp_path / "checkpoints", "former")
    former.begin(a_welcome(policy_version=6))
    former.reserve(7, 0)
    former.note_digest(7, "that of other weights")
    async with training(tmp_path, broker_version=6) as learner:
        await learner.take(Resume)
        assert (await learner.take(Published)).policy_version == 8  # type: ignore[attr-defined]
        assert newest_given(tmp_path / "checkpoints") == 8
        await learner.take(BatchRequest)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


async def test_a_learner_that_trains_batches_again_publishes_nothing_before_the_newest_version(tmp_path: Path) -> None:
    """Its newest checkpoint is damaged. The one before covers two of three batches; the third makes the same weights."""
    async with training(tmp_path, broker_version=0) as learner:
        await learner.take(Resume)
        await learner.take(Published)
        for index in range(3):
            await learner.train(index, index + 1)
            newest = await learner.take(Published)
            assert isinstance(newest, Published)
            await learner.take(Trained)
            if index == 1:
                await learner.take(Checkpointed)
        await learner.take(BatchRequest)
        learner.stop.set()
        await learner.take(Checkpointed)
    assert (newest.policy_version, newest.trained_batches) == (4, 3)
    flip_a_bit(tmp_path / "checkpoints" / "version-0000000004-batch-0000000003" / "engine" / "table.safetensors")
    async with training(tmp_path, 4, trained_batches=3, weights_digest=newest.digest) as again:
        assert await again.take(Resume) == Resume(next_batch=2)
        await again.train(2, 0, made_at=3)
        published = await again.take(Published)
        assert isinstance(published, Published)
        assert (published.policy_version, published.digest) == (4, newest.digest)
        trained = await again.take(Trained)
        assert isinstance(trained, Trained)
        assert (trained.index, trained.policy_version) == (2, 4)
        assert await again.take(BatchRequest) == BatchRequest(index=3, policy_version=4)


async def test_batches_before_the_last_one_are_reported_as_made_into_no_version(tmp_path: Path) -> None:
    async with training(tmp_path, 9, trained_batches=3, weights_digest="that of other weights") as learner:
        assert await learner.take(Resume) == Resume(next_batch=0)
        for index in range(2):
            await learner.train(index, 0)
            trained = await learner.take(Trained)
            assert isinstance(trained, Trained)
            assert (trained.index, trained.policy_version) == (index, 0)
        assert await learner.take(Checkpointed) == Checkpointed(next_batch=2, policy_version=0)
        await learner.train(2, 0)
        published = await learner.take(Published)
        assert isinstance(published, Published)
        assert (published.policy_version, published.trained_batches) == (10, 3), "they are other weights than version 9"
        assert (await learner.take(Trained)).policy_version == 10  # type: ignore[attr-defined]


async def test_the_time_spent_waiting_is_counted_once(tmp_path: Path) -> None:
    begin = asyncio.get_running_loop().time()
    async with training(tmp_path, broker_version=0) as learner:
        await learner.take(Resume)
        await learner.take(Published)
        for _ in range(3):  # the request is repeated every two seconds
            await learner.take(BatchRequest)
        learner.stop.set()
        await learner.take(Checkpointed)
    waited = learner.registry.get_sample_value("gspo_learner_wait_seconds_total")
    assert waited is not None
    assert 3.9 < waited <= asyncio.get_running_loop().time() - begin


async def test_a_batch_keeps_the_version_for_which_it_was_assembled(tmp_path: Path) -> None:
    """Delivered again to a restarted learner, it has the same lag as before."""
    async with training(tmp_path, broker_version=9) as learner:
        await learner.take(Resume)
        await learner.take(Published)
        await learner.take(BatchRequest)
        await send_batch(learner.end, a_training_batch(0, 5, oldest=4))
        await learner.take(Published)
        trained = await learner.take(Trained)
        assert isinstance(trained, Trained)
        assert trained.policy_version == 11
        assert trained.metrics["lag/all"] == 1.0


async def test_a_batch_that_training_raises_on_is_reported_before_the_learner_ends(tmp_path: Path) -> None:
    with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012 - what is raised is known when the block ends
        async with training(tmp_path, broker_version=0) as learner:
            assert isinstance(await learner.take(Resume), Resume)
            await learner.take(Published)
            await learner.take(BatchRequest)
            await send_batch(learner.end, a_training_batch(0, 1, bad_token=60_000))  # The table has no such row.
            failed = await learner.take(BatchFailed)
    assert isinstance(failed, BatchFailed)
    assert (failed.index, failed.raised) == (0, True)
    (error,) = caught.value.exceptions
    assert failed.reason.startswith(f"{type(error).__name__}: ")


async def test_a_batch_that_was_quarantined_changes_no_weights_and_all_counts_go_on(tmp_path: Path) -> None:
    async with training(tmp_path, broker_version=0) as learner:
        await learner.take(Resume)
        first = await learner.take(Published)
        assert isinstance(first, Published)
        await learner.take(BatchRequest)
        await learner.end.reply(SkipBatch(index=0, reason="2 learners could not train it"))
        second = await learner.take(Published)
        assert isinstance(second, Published)
        assert (second.policy_version, second.trained_batches) == (first.policy_version + 1, 1)
        assert second.digest == first.digest
        assert await learner.take(Trained) == Trained(index=0, policy_version=2, metrics={}, skipped=True)
        await learner.train(1, 2)
        third = await learner.take(Published)
        assert isinstance(third, Published)
        assert (third.policy_version, third.trained_batches, third.digest != first.digest) == (3, 2, True)
        await learner.take(Trained)
        assert await learner.take(Checkpointed) == Checkpointed(next_batch=2, policy_version=3)
