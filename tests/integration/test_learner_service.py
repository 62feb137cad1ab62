"""The training loop between a scripted broker and an engine that is a table of logits."""

import asyncio
import contextlib
import math
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from protocol.channels import BATCH
from protocol.messages import (
    Batch,
    BatchItem,
    BatchRequest,
    Checkpointed,
    Message,
    Published,
    Resume,
    Segment,
    Trained,
    VersionRun,
    Welcome,
)
from services.learner.checkpoint import CheckpointError, reserve_version, reserved_version
from services.learner.conversation import BatchArrived
from services.learner.link import Link
from services.learner.metrics import LearnerMetrics
from services.learner.saving import Background
from services.learner.service import FLUSH_S, NOT_YET, POLL_S, STOPPED, LearnerService
from services.learner.share import MAX_SHARED_FRAMES, NO_FRAME, STOP
from services.learner.snapshot import WeightCopy
from services.runtime.clock import MonotonicClock
from services.runtime.lifecycle import ServiceError
from services.runtime.settings import BatchSection, Broker, Learner, ObjectiveSection, Run, Settings
from services.runtime.telemetry import Health
from tests.support.bigram_engine import BigramEngine
from tests.support.held_background import HeldBackground
from tests.support.zmq_ends import ANY_PORT, ScriptedEnd, a_welcome, in_background, zmq_context

PLAIN = ObjectiveSection()
REPORTS = (Published, Checkpointed, Trained, Resume, BatchRequest)


class ServingBigram(BigramEngine):
    """With the two more things that the service needs of an engine."""

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0) -> torch.Tensor:
        return tensor.clone()

    def serving_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        yield "table", self.table.detach()


def a_batch(index: int, policy_version: int) -> tuple[Batch, dict[str, np.ndarray]]:
    """Four groups of two, one member of each rewarded."""
    items, tokens = [], []
    random = np.random.default_rng(index)
    for group in range(4):
        for member in range(2):
            tokens.append(random.integers(0, 16, 6))
            segments = [Segment("observation", 0, 2), Segment("action", 0, 4)]
            runs = [VersionRun(-1, 2), VersionRun(policy_version, 4)]
            items.append(
                BatchItem(8 * index + 2 * group + member, 4 * index + group, 6, segments, runs, [float(member)], "done")
            )
    arrays = {
        "token_ids": np.concatenate(tokens).astype(np.int32),
        "logprobs": np.full(48, -2.7, dtype=np.float32),
    }
    return Batch(index=index, policy_version=policy_version, temperature=1.0, items=items), arrays


class Training:
    """A LearnerService in a thread, and the broker's end of its link."""

    def __init__(self, end: ScriptedEnd, directory: Path, objective: ObjectiveSection) -> None:
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
        self._link = Link(settings, session="s", clock=clock, health=self.health, metrics=metrics)
        self._parts = (settings, clock, metrics)
        self._asked: BatchRequest | None = None

    def run(self) -> None:
        settings, clock, metrics = self._parts
        with self._link as link:
            LearnerService(
                settings,
                self.engine,  # type: ignore[arg-type]
                link,
                clock=clock,
                health=self.health,
                metrics=metrics,
                stop=self.stop,
            ).run()

    async def take(self, kind: type[Message]) -> Message:
        """The next report, which must be of this kind; acknowledged. Requests, which are repeated and may come while a
        version is still being announced, are kept until they are asked for."""
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

    async def train(self, index: int, policy_version: int) -> None:
        """Answer the request for a batch."""
        while await self.take(BatchRequest) != BatchRequest(index=index, policy_version=policy_version):
            pass
        await self.end.reply(*a_batch(index, policy_version))


@contextlib.asynccontextmanager
async def training(directory: Path, broker_version: int, objective: ObjectiveSection = PLAIN) -> AsyncIterator[Training]:
    """Runs until the block ends, then is stopped and must end by itself."""
    async with zmq_context() as context:
        learner = Training(ScriptedEnd(context, BATCH), directory, objective)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(asyncio.to_thread(learner.run))
            try:
                await learner.end.welcome(policy_version=broker_version)
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


async def test_a_stop_saves_what_was_trained_and_tells_the_broker_before_it_leaves(tmp_path: Path) -> None:
    async with training(tmp_path, broker_version=0) as learner:
        await learner.take(Resume)
        await learner.take(Published)
        await learner.train(0, 1)
        await learner.take(Published)
        await learner.take(Trained)
        learner.stop.set()
        assert await learner.take(Checkpointed) == Checkpointed(next_batch=1, policy_version=2)
        table = learner.engine.table.detach().clone()

    async with training(tmp_path, broker_version=2) as again:
        assert await again.take(Resume) == Resume(next_batch=1)
        published = await again.take(Published)
        assert isinstance(published, Published)
        assert (published.policy_version, published.trained_batches) == (3, 1)
        assert torch.equal(again.engine.table.detach(), table)
        assert await again.take(BatchRequest) == BatchRequest(index=1, policy_version=3)


async def test_the_scale_of_an_adaptive_clip_goes_on_after_a_restart(tmp_path: Path) -> None:
    objective = ObjectiveSection(adaptive_clip_target=0.01, anchor="behaviour")

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


async def test_a_run_without_an_adaptive_clip_resumes_from_one_with_it_and_the_other_way_round(tmp_path: Path) -> None:
    for version, objective in enumerate((PLAIN, ObjectiveSection(adaptive_clip_target=0.1), PLAIN)):
        async with training(tmp_path, version, objective) as learner:
            await learner.take(Resume)
            await learner.take(Published)
            learner.stop.set()


async def test_versions_go_on_behind_the_checkpoint_when_the_broker_has_forgotten_them(tmp_path: Path) -> None:
    async with training(tmp_path, broker_version=40) as learner:
        await learner.take(Resume)
        assert (await learner.take(Published)).policy_version == 41  # type: ignore[attr-defined]
        await learner.take(BatchRequest)
        learner.stop.set()
        assert await learner.take(Checkpointed) == Checkpointed(next_batch=0, policy_version=41)
    async with training(tmp_path, broker_version=0) as again:
        await again.take(Resume)
        assert (await again.take(Published)).policy_version == 42  # type: ignore[attr-defined]


async def test_a_version_that_only_an_engine_has_seen_is_not_given_to_other_weights(tmp_path: Path) -> None:
    """The learner is killed after an engine has fetched version 7 and before the broker has committed it."""
    reserve_version(tmp_path / "checkpoints", 7)
    async with training(tmp_path, broker_version=6) as learner:
        await learner.take(Resume)
        assert (await learner.take(Published)).policy_version == 8  # type: ignore[attr-defined]
        assert reserved_version(tmp_path / "checkpoints") == 8
        await learner.take(BatchRequest)


class SecondRank(ServingBigram):
    """What rank 0 broadcasts, by script."""

    rank = 1
    world_size = 2

    def __init__(self, *broadcasts: list[int]) -> None:
        super().__init__()
        self.broadcasts = [torch.tensor(numbers) for numbers in broadcasts]
        self.rounds_of_the_first = 0

    def sum_over_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0's flags of `CheckpointSaver.advance` are raised in so many rounds: it waits for the broker."""
        if tensor.shape != (2,) or not self.rounds_of_the_first:
            return tensor
        self.rounds_of_the_first -= 1
        return tensor + torch.tensor([1.0, 0.0])

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0) -> torch.Tensor:
        answer = self.broadcasts.pop(0)
        assert answer.shape == tensor.shape
        return answer


class AskedElsewhere(ServingBigram):
    """Rank 0 of two, whose other rank was asked to stop."""

    world_size = 2

    def __init__(self) -> None:
        super().__init__()
        self.num_meetings = 0

    def sum_over_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor + 1

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0) -> torch.Tensor:
        self.num_meetings += 1
        assert self.num_meetings < 3, "it waits on"
        return tensor.clone()


def without_link(engine: ServingBigram, directory: Path) -> LearnerService:
    clock = MonotonicClock()
    return LearnerService(
        Settings(run=Run(directory=directory)),
        engine,  # type: ignore[arg-type]
        None,
        clock=clock,
        health=Health(clock, 60.0),
        metrics=LearnerMetrics(CollectorRegistry()),
        stop=threading.Event(),
    )


def test_ranks_meet_again_and_again_while_the_first_waits_for_the_broker(tmp_path: Path) -> None:
    """A collective in which one rank is half an hour late fails."""
    engine = SecondRank([NOT_YET], [NOT_YET], [40], [40], [STOP, *[NO_FRAME] * MAX_SHARED_FRAMES], [NOT_YET], [NOT_YET])
    engine.rounds_of_the_first = 2
    # Rank 0 writes the checkpoint's common part; this one has a directory of its own to write into.
    (tmp_path / "checkpoints" / ".partial-version-0000000041-batch-0000000000").mkdir(parents=True)
    without_link(engine, tmp_path).run()
    assert engine.broadcasts == []
    assert engine.rounds_of_the_first == 0


def test_a_stop_while_the_broker_is_away_ends_every_rank(tmp_path: Path) -> None:
    engine = SecondRank([NOT_YET], [STOPPED])
    with pytest.raises(ServiceError, match="stopped before the broker answered"):
        without_link(engine, tmp_path).run()


def test_a_stop_of_another_rank_while_the_broker_is_away_ends_this_one_too(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="stopped before the broker answered"):
        without_link(AskedElsewhere(), tmp_path).run()


def test_a_checkpoint_that_is_gone_ends_the_process_with_a_line_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/latest").write_text("version-0000000009-batch-0000000004\n")
    with pytest.raises(ServiceError, match="version-0000000009-batch-0000000004, which is not there"):
        without_link(SecondRank(), tmp_path).run()


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


async def test_a_batch_keeps_the_version_that_it_was_assembled_for(tmp_path: Path) -> None:
    """Delivered again to a later life of the learner, its lag is what it was."""
    async with training(tmp_path, broker_version=9) as learner:
        await learner.take(Resume)
        await learner.take(Published)
        await learner.take(BatchRequest)
        batch, arrays = a_batch(0, 4)
        await learner.end.reply(msgspec.structs.replace(batch, policy_version=5), arrays)
        await learner.take(Published)
        trained = await learner.take(Trained)
        assert isinstance(trained, Trained)
        assert trained.policy_version == 11
        assert trained.metrics["lag/all"] == 1.0


class DeafLink:
    """One batch, and a broker that acknowledges at the third look. Remembers what was said and what was on disk then."""

    waiting_for = ""
    encoding = False

    def __init__(self, root: Path, stop: threading.Event, *, deaf: int) -> None:
        self.said: list[str] = []
        self._root = root
        self._stop = stop
        self._deaf = deaf
        self._batch: BatchArrived | None = BatchArrived(batch=a_batch(0, 1)[0], arrays=a_batch(0, 1)[1])

    def _say(self, what: str) -> None:
        saved = len(list(self._root.glob("version-*")))
        self.said.append(f"{what}, {saved} saved")

    def wait_welcome(self, timeout_s: float) -> Welcome:
        return a_welcome(policy_version=0)

    def resume(self, next_batch: int) -> None:
        self._say("resume")

    def request(self, index: int, policy_version: int) -> None:
        self._say(f"request {index}")

    def take(self, timeout_s: float) -> BatchArrived | None:
        taken, self._batch = self._batch, None
        if taken is None:
            self._stop.set()
        return taken

    def wait_announced(self) -> None:
        self._say("nothing is being announced")

    def publish(self, policy_version: int, weights: WeightCopy, trained_batches: int) -> None:
        self._say(f"published {trained_batches}")

    def trained(self, index: int, policy_version: int, metrics: dict[str, float | None]) -> None:
        self._say(f"trained {index}")

    def mark(self) -> int:
        return 1

    def acknowledged(self, mark: int) -> bool:
        return self._deaf < 0

    def checkpointed(self, next_batch: int, policy_version: int) -> None:
        self._say(f"checkpointed {next_batch}")

    def flush(self, timeout_s: float) -> bool:
        self._deaf -= 1
        self._say("heard" if self._deaf < 0 else "not heard")
        return self._deaf < 0


def run_with(
    link: DeafLink,
    directory: Path,
    stop: threading.Event,
    checkpoint_every_batches: int,
    background: Background | None = None,
    in_background: bool = True,
) -> list[str]:
    clock = MonotonicClock()
    settings = Settings(
        run=Run(directory=directory),
        batch=BatchSection(group_size=2, groups_per_batch=4, mini_batches=2),
        objective=PLAIN,
        learner=Learner(checkpoint_every_batches=checkpoint_every_batches, checkpoint_in_background=in_background),
    )
    health, metrics = Health(clock, 60.0), LearnerMetrics(CollectorRegistry())
    engine, as_link = ServingBigram(), link
    LearnerService(
        settings,
        engine,
        as_link,
        clock=clock,
        health=health,
        metrics=metrics,
        stop=stop,
        background=background,
    ).run()
    return link.said


class ManyBatches(DeafLink):
    """A broker that hears everything and has four batches, then none; the last look for one stops the learner."""

    def __init__(self, root: Path, stop: threading.Event) -> None:
        super().__init__(root, stop, deaf=0)
        self._wanted = 0

    def acknowledged(self, mark: int) -> bool:
        return True

    def request(self, index: int, policy_version: int) -> None:
        super().request(index, policy_version)
        self._wanted = index
        self._batch = BatchArrived(batch=a_batch(index, 1)[0], arrays=a_batch(index, 1)[1]) if index < 4 else None


def test_batches_are_trained_while_a_checkpoint_is_being_written_and_a_stop_waits_for_it(tmp_path: Path) -> None:
    stop = threading.Event()
    link = ManyBatches(tmp_path / "checkpoints", stop)
    # Nobody waits before the learner is stopped: the one checkpoint is written until then, and all batches are trained.
    said = run_with(link, tmp_path, stop, checkpoint_every_batches=3, background=HeldBackground(until_waited_for=True))
    assert [line for line in said if "trained" in line or "checkpointed" in line] == [
        "trained 0, 0 saved",
        "trained 1, 0 saved",
        "trained 2, 0 saved",
        "trained 3, 0 saved",
        "checkpointed 3, 1 saved",
        "checkpointed 4, 2 saved",
    ]


def test_the_next_checkpoint_waits_for_the_one_that_is_being_written(tmp_path: Path) -> None:
    stop = threading.Event()
    link = ManyBatches(tmp_path / "checkpoints", stop)
    said = run_with(link, tmp_path, stop, checkpoint_every_batches=2, background=HeldBackground(until_waited_for=True))
    assert [line for line in said if "trained" in line or "checkpointed" in line][3:] == [
        "trained 3, 0 saved",
        "checkpointed 2, 1 saved",
        "checkpointed 4, 2 saved",
    ]


def test_a_checkpoint_that_is_on_disk_is_published_at_the_next_batch(tmp_path: Path) -> None:
    stop = threading.Event()
    link = ManyBatches(tmp_path / "checkpoints", stop)
    said = run_with(link, tmp_path, stop, checkpoint_every_batches=2, background=HeldBackground(until_waited_for=False))
    assert [line for line in said if "trained" in line or "checkpointed" in line] == [
        "trained 0, 0 saved",
        "trained 1, 0 saved",
        "trained 2, 0 saved",
        "checkpointed 2, 1 saved",
        "trained 3, 1 saved",
        "checkpointed 4, 2 saved",
    ]


def test_without_a_background_a_checkpoint_is_there_before_the_next_batch_is_asked_for(tmp_path: Path) -> None:
    stop = threading.Event()
    link = ManyBatches(tmp_path / "checkpoints", stop)
    said = run_with(link, tmp_path, stop, checkpoint_every_batches=2, in_background=False)
    assert said.index("checkpointed 2, 1 saved") < said.index("request 2, 1 saved")


def test_a_checkpoint_that_cannot_be_written_beside_training_ends_the_learner_with_the_reason(tmp_path: Path) -> None:
    stop = threading.Event()
    link = ManyBatches(tmp_path / "checkpoints", stop)
    background = HeldBackground(until_waited_for=False, failure=OSError("No space left on device"))
    with pytest.raises(CheckpointError, match=r"No space left on device; .* Checkpoints before it are intact"):
        run_with(link, tmp_path, stop, checkpoint_every_batches=2, background=background)
    assert "checkpointed" not in " ".join(link.said)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["last-version"]


class StandbyLink(DeafLink):
    """The broker welcomes at the second look; between the two the one that has the run saves its last checkpoint."""

    refused = "learner session a has this run"

    def __init__(self, root: Path, stop: threading.Event) -> None:
        super().__init__(root, stop, deaf=0)
        self._batch = None
        self.resumed_at: int | None = None
        self._looks = 0

    def wait_welcome(self, timeout_s: float) -> Welcome | None:  # type: ignore[override]
        self._looks += 1
        if self._looks == 1:
            stop = threading.Event()
            run_with(DeafLink(self._root, stop, deaf=0), self._root.parent, stop, checkpoint_every_batches=1)
            return None
        return a_welcome(policy_version=2)

    def resume(self, next_batch: int) -> None:
        self.resumed_at = next_batch


def test_a_learner_that_waited_for_another_one_goes_on_from_that_one_s_last_checkpoint(tmp_path: Path) -> None:
    """From an older one it would ask for ever for batches that are settled."""
    stop = threading.Event()
    link = StandbyLink(tmp_path / "checkpoints", stop)
    run_with(link, tmp_path, stop, checkpoint_every_batches=1)
    assert link.resumed_at == 1


def test_no_checkpoint_covers_a_batch_before_the_broker_has_its_report(tmp_path: Path) -> None:
    """A learner that died in between would leave a batch that nobody trains again and of which there is no record."""
    stop = threading.Event()
    said = run_with(DeafLink(tmp_path / "checkpoints", stop, deaf=2), tmp_path, stop, checkpoint_every_batches=1)
    first = said.index("trained 0, 0 saved")
    assert said[first : first + 6] == [
        "trained 0, 0 saved",
        "request 1, 0 saved",
        "not heard, 0 saved",
        "not heard, 0 saved",
        "heard, 0 saved",
        "checkpointed 1, 1 saved",
    ]


def test_a_stop_without_a_broker_leaves_what_it_has_not_heard_of_to_be_trained_again(tmp_path: Path) -> None:
    stop = threading.Event()
    said = run_with(DeafLink(tmp_path / "checkpoints", stop, deaf=1000), tmp_path, stop, checkpoint_every_batches=2)
    assert said[-3:] == ["not heard, 0 saved"] * 3
    assert said.count("not heard, 0 saved") == FLUSH_S / POLL_S + 1
