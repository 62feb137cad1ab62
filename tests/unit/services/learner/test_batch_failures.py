"""What a learner says about a batch that it could not train."""

import threading
from pathlib import Path

import pytest

from gspo_protocol.messages import BatchFailed
from gspo_services.learner.batch_failures import BatchFailures
from gspo_services.learner.broker.port import NoBroker, ToBroker
from gspo_services.learner.engine import MissingGradientError, NonFiniteLossError
from gspo_services.shared.runtime.errors import ServiceError
from tests.support.learner.scripted_broker import ScriptedBroker

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer."


class Listening(ScriptedBroker):
    """Keeps what it is told; ``broken``: it cannot be told anything."""

    def __init__(self, *, broken: bool = False) -> None:
        super().__init__(threading.Event(), 0)
        self.told: list[ToBroker] = []
        self._broken = broken

    def tell(self, message: ToBroker) -> None:
        if self._broken:
            raise ServiceError("the learner's connection to the broker is closed")
        self.told.append(message)


def fail(failures: BatchFailures, error: BaseException, index: int = 3) -> None:
    """Training the batch raises, and so does the watched block."""
    with pytest.raises(type(error)) as caught, failures.of(index):
        raise error
    assert caught.value is error


def test_an_error_of_training_is_reported_and_raised_again(tmp_path: Path) -> None:
    broker = Listening()
    fail(BatchFailures(broker, tmp_path, rank=0), NonFiniteLossError("the loss is nan"))
    assert broker.told == [BatchFailed(index=3, reason="NonFiniteLossError: the loss is nan", raised=True)]


def test_a_long_error_is_cut(tmp_path: Path) -> None:
    broker = Listening()
    fail(BatchFailures(broker, tmp_path, rank=0), ValueError("x" * 10_000))
    (report,) = broker.told
    assert isinstance(report, BatchFailed)
    assert len(report.reason) == 1024


@pytest.mark.parametrize("error", [MissingGradientError("no gradient for a layer"), KeyboardInterrupt()])
def test_what_is_not_the_batchs_fault_is_not_reported(error: BaseException, tmp_path: Path) -> None:
    broker = Listening()
    fail(BatchFailures(broker, tmp_path, rank=0), error)
    assert broker.told == []


def test_a_rank_that_is_lost_without_a_word_is_no_report_of_an_error(tmp_path: Path) -> None:
    broker = Listening()
    fail(BatchFailures(broker, tmp_path, rank=0), RuntimeError(GLOO))
    assert broker.told == [BatchFailed(index=3, reason=f"RuntimeError: {GLOO}", raised=False)]


def test_another_ranks_error_is_reported_by_rank_0(tmp_path: Path) -> None:
    broker = Listening()
    other, first = BatchFailures(NoBroker(), tmp_path, rank=1), BatchFailures(broker, tmp_path, rank=0)
    first.begin()
    fail(other, ValueError("token 70000 of 65536"))
    fail(first, RuntimeError(GLOO))
    assert broker.told == [BatchFailed(index=3, reason="ValueError: token 70000 of 65536", raised=True)]
    assert list(tmp_path.iterdir()) == []


def test_a_note_on_another_batch_or_of_an_earlier_life_says_nothing(tmp_path: Path) -> None:
    broker = Listening()
    other, first = BatchFailures(NoBroker(), tmp_path, rank=1), BatchFailures(broker, tmp_path, rank=0)
    fail(other, ValueError("of an earlier life"))
    first.begin()
    fail(first, RuntimeError(GLOO))
    fail(other, ValueError("of another batch"), index=2)
    (tmp_path / "batch-failed-rank-7.json").write_text("cut")
    fail(first, RuntimeError(GLOO))
    assert [report.raised for report in broker.told if isinstance(report, BatchFailed)] == [False, False]


def test_a_rank_that_lost_another_leaves_no_note(tmp_path: Path) -> None:
    fail(BatchFailures(NoBroker(), tmp_path, rank=1), RuntimeError(GLOO))
    assert list(tmp_path.iterdir()) == []


def test_a_broker_that_cannot_be_told_does_not_hide_the_error(tmp_path: Path) -> None:
    fail(BatchFailures(Listening(broken=True), tmp_path, rank=0), ValueError("the error"))
