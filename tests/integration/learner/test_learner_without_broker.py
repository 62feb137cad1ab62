"""The broker is away, acknowledges late or serves another learner: what the learner saves, and how its ranks end."""

import threading
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from gspo_protocol.messages import BatchRequest, Checkpointed, Resume, Trained, Welcome
from gspo_services.learner.broker.port import NoBroker, Publication, ToBroker
from gspo_services.learner.checkpoints.format import CheckpointError
from gspo_services.learner.checkpoints.saver import Background
from gspo_services.learner.metrics import LearnerMetrics
from gspo_services.learner.service import FLUSH_S, NOT_YET, POLL_S, STOPPED, LearnerService
from gspo_services.learner.share import MAX_SHARED_FRAMES, NO_FRAME, STOP
from gspo_services.shared.runtime.clock import MonotonicClock
from gspo_services.shared.runtime.errors import ServiceError
from gspo_services.shared.runtime.telemetry import Health
from gspo_services.shared.settings.sections import BatchSection, Learner, Run, Settings
from tests.support.learner.held_background import HeldBackground
from tests.support.learner.scripted_broker import ScriptedBroker
from tests.support.learner.serving_bigram import ServingBigram
from tests.support.wire.zmq_ends import a_welcome


class SecondRank(ServingBigram):
    """Rank 1 of two; rank 0's broadcasts are scripted."""

    rank = 1
    world_size = 2

    def __init__(self, *broadcasts: list[int]) -> None:
        super().__init__()
        self.broadcasts = [torch.tensor(numbers) for numbers in broadcasts]
        self.rounds_of_the_first = 0

    def sum_over_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        """In ``rounds_of_the_first`` rounds rank 0 waits for the broker and raises a flag of ``CheckpointSaver.advance``."""
        if tensor.shape != (2,) or not self.rounds_of_the_first:
            return tensor
        self.rounds_of_the_first -= 1
        return tensor + torch.tensor([1.0, 0.0])

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0) -> torch.Tensor:
        answer = self.broadcasts.pop(0)
        assert answer.shape == tensor.shape
        return answer


class AskedElsewhere(ServingBigram):
    """Rank 0 of two; the other rank was asked to stop."""

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


def without_broker(engine: ServingBigram, directory: Path) -> LearnerService:
    clock = MonotonicClock()
    return LearnerService(
        Settings(run=Run(directory=directory)),
        engine,  # type: ignore[arg-type]
        NoBroker(),
        clock=clock,
        health=Health(clock, 60.0),
        metrics=LearnerMetrics(CollectorRegistry()),
        stop=threading.Event(),
    )


def test_ranks_keep_meeting_while_the_first_waits_for_the_broker(tmp_path: Path) -> None:
    """A collective in which one rank is half an hour late fails."""
    engine = SecondRank(
        [NOT_YET], [NOT_YET], [0], [-1, -1], [0], [41], [STOP, *[NO_FRAME] * MAX_SHARED_FRAMES], [NOT_YET], [NOT_YET]
    )
    engine.rounds_of_the_first = 2
    # Rank 0 makes the directory of a checkpoint; this rank needs one to write into.
    (tmp_path / "checkpoints" / ".partial-version-0000000041-batch-0000000000").mkdir(parents=True)
    with capture_logs() as lines:
        without_broker(engine, tmp_path).run()
    assert engine.broadcasts == []
    assert engine.rounds_of_the_first == 0
    # The checkpoint that all ranks saved is in rank 0's log.
    assert [line["event"] for line in lines] == ["stopping"]


def test_a_stop_while_the_broker_is_away_ends_every_rank(tmp_path: Path) -> None:
    engine = SecondRank([NOT_YET], [STOPPED])
    with pytest.raises(ServiceError, match="stopped before the broker answered"):
        without_broker(engine, tmp_path).run()


def test_a_stop_of_another_rank_while_the_broker_is_away_ends_this_one_too(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="stopped before the broker answered"):
        without_broker(AskedElsewhere(), tmp_path).run()


class DeafBroker(ScriptedBroker):
    """Acknowledges nothing in the first ``deaf`` flushes. Remembers each call, and how much was saved then."""

    def __init__(self, root: Path, stop: threading.Event, *, deaf: int, num_batches: int = 1) -> None:
        super().__init__(stop, num_batches)
        self.said: list[str] = []
        self._root = root
        self._deaf = deaf

    def _say(self, what: str) -> None:
        saved = len(list(self._root.glob("version-*")))
        self.said.append(f"{what}, {saved} saved")

    def tell(self, message: ToBroker) -> None:
        super().tell(message)
        match message:
            case Resume():
                self._say("resume")
            case BatchRequest():
                self._say(f"request {message.index}")
            case Trained():
                self._say(f"trained {message.index}")
            case Checkpointed():
                self._say(f"checkpointed {message.next_batch}")

    def wait_for_room(self) -> None:
        self._say("nothing is being announced")

    def publish(self, publication: Publication) -> None:
        self._say(f"published {publication.trained_batches}")

    def acknowledged(self, next_batch: int) -> bool:
        return self._deaf < 0

    def flush(self, timeout_s: float) -> bool:
        self._deaf -= 1
        self._say("heard" if self._deaf < 0 else "not heard")
        return self._deaf < 0


def run_with(
    broker: DeafBroker,
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
        learner=Learner(checkpoint_every_batches=checkpoint_every_batches, checkpoint_in_background=in_background),
    )
    health, metrics = Health(clock, 60.0), LearnerMetrics(CollectorRegistry())
    engine = ServingBigram()
    LearnerService(
        settings,
        engine,  # type: ignore[arg-type]
        broker,
        clock=clock,
        health=health,
        metrics=metrics,
        stop=stop,
        background=background,
    ).run()
    return broker.said


class ManyBatches(DeafBroker):
    """A broker with four batches that has acknowledged every report at once."""

    def __init__(self, root: Path, stop: threading.Event) -> None:
        super().__init__(root, stop, deaf=0, num_batches=4)

    def acknowledged(self, next_batch: int) -> bool:
        return True


def test_batches_are_trained_while_a_checkpoint_is_being_written_and_a_stop_waits_for_it(tmp_path: Path) -> None:
    stop = threading.Event()
    broker = ManyBatches(tmp_path / "checkpoints", stop)
    # Nobody waits before the learner is stopped: until then the checkpoint is being written, and all batches are trained.
    said = run_with(broker, tmp_path, stop, checkpoint_every_batches=3, background=HeldBackground(until_waited_for=True))
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
    broker = ManyBatches(tmp_path / "checkpoints", stop)
    said = run_with(broker, tmp_path, stop, checkpoint_every_batches=2, background=HeldBackground(until_waited_for=True))
    assert [line for line in said if "trained" in line or "checkpointed" in line][3:] == [
        "trained 3, 0 saved",
        "checkpointed 2, 1 saved",
        "checkpointed 4, 2 saved",
    ]


def test_a_checkpoint_that_is_on_disk_is_published_at_the_next_batch(tmp_path: Path) -> None:
    stop = threading.Event()
    broker = ManyBatches(tmp_path / "checkpoints", stop)
    said = run_with(broker, tmp_path, stop, checkpoint_every_batches=2, background=HeldBackground(until_waited_for=False))
    assert [line for line in said if "trained" in line or "checkpointed" in line] == [
        "trained 0, 0 saved",
        "trained 1, 0 saved",
        "trained 2, 0 saved",
        "checkpointed 2, 1 saved",
        "trained 3, 1 saved",
        "checkpointed 4, 2 saved",
    ]


def test_without_a_background_a_checkpoint_is_complete_before_the_next_batch_is_requested(tmp_path: Path) -> None:
    stop = threading.Event()
    broker = ManyBatches(tmp_path / "checkpoints", stop)
    said = run_with(broker, tmp_path, stop, checkpoint_every_batches=2, in_background=False)
    assert said.index("checkpointed 2, 1 saved") < said.index("request 2, 1 saved")


def test_a_checkpoint_that_cannot_be_written_during_training_ends_the_learner_with_the_reason(tmp_path: Path) -> None:
    stop = threading.Event()
    broker = ManyBatches(tmp_path / "checkpoints", stop)
    background = HeldBackground(until_waited_for=False, failure=OSError("No space left on device"))
    with pytest.raises(CheckpointError, match=r"No space left on device; .* Earlier checkpoints are intact"):
        run_with(broker, tmp_path, stop, checkpoint_every_batches=2, background=background)
    assert "checkpointed" not in " ".join(broker.said)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["last-version"]


class StandbyBroker(DeafBroker):
    """Welcomes at the second look. Between the two the learner that has the run saves its last checkpoint."""

    reason_to_wait = "learner session a has this run"

    def __init__(self, root: Path, stop: threading.Event) -> None:
        super().__init__(root, stop, deaf=0, num_batches=0)
        self.resumed_at: int | None = None
        self._looks = 0

    def wait_welcome(self, timeout_s: float) -> Welcome | None:
        self._looks += 1
        if self._looks == 1:
            stop = threading.Event()
            run_with(DeafBroker(self._root, stop, deaf=0), self._root.parent, stop, checkpoint_every_batches=1)
            return None
        return a_welcome(policy_version=2)

    def tell(self, message: ToBroker) -> None:
        super().tell(message)
        if isinstance(message, Resume):
            self.resumed_at = message.next_batch


def test_a_learner_that_waited_for_another_one_continues_from_its_last_checkpoint(tmp_path: Path) -> None:
    """From an older one it would ask for ever for batches that are checkpointed already."""
    stop = threading.Event()
    broker = StandbyBroker(tmp_path / "checkpoints", stop)
    run_with(broker, tmp_path, stop, checkpoint_every_batches=1)
    assert broker.resumed_at == 1


def test_no_checkpoint_covers_a_batch_before_the_broker_has_its_report(tmp_path: Path) -> None:
    """If the learner died in between, nobody would train the batch again, and no record of it would exist."""
    stop = threading.Event()
    said = run_with(DeafBroker(tmp_path / "checkpoints", stop, deaf=2), tmp_path, stop, checkpoint_every_batches=1)
    first = said.index("trained 0, 0 saved")
    assert said[first : first + 6] == [
        "trained 0, 0 saved",
        "request 1, 0 saved",
        "not heard, 0 saved",
        "not heard, 0 saved",
        "heard, 0 saved",
        "checkpointed 1, 1 saved",
    ]


def test_after_a_stop_without_a_broker_the_unreported_batches_are_trained_again(tmp_path: Path) -> None:
    stop = threading.Event()
    said = run_with(DeafBroker(tmp_path / "checkpoints", stop, deaf=1000), tmp_path, stop, checkpoint_every_batches=2)
    assert said[-3:] == ["not heard, 0 saved"] * 3
    assert said.count("not heard, 0 saved") == FLUSH_S / POLL_S + 1
