"""A learner whose broker is away, deaf, or another learner's: what it saves, and how all its ranks end."""

import threading
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry

from protocol.messages import Welcome
from services.learner.broker.exchange import BatchArrived
from services.learner.checkpoints.format import CheckpointError
from services.learner.checkpoints.saving import Background
from services.learner.metrics import LearnerMetrics
from services.learner.service import FLUSH_S, NOT_YET, POLL_S, STOPPED, LearnerService
from services.learner.share import MAX_SHARED_FRAMES, NO_FRAME, STOP
from services.learner.weights.snapshot import WeightCopy
from services.runtime.clock import MonotonicClock
from services.runtime.errors import ServiceError
from services.runtime.settings.sections import BatchSection, Learner, Run, Settings
from services.runtime.telemetry import Health
from tests.integration.learner.test_learner_service import PLAIN, ServingBigram, a_batch
from tests.support.learner.held_background import HeldBackground
from tests.support.wire.zmq_ends import a_welcome


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
