"""A stand-in for the broker on ranks other than 0: it sends and expects nothing."""

from collections.abc import Callable

from gspo_protocol.messages import Welcome
from gspo_protocol.messages.experts import ModelExperts
from gspo_services.learner.broker.batches import Answer
from gspo_services.learner.broker.port import BrokerPort, ToBroker
from gspo_services.learner.weights import WeightCopy


class NoBroker(BrokerPort):
    """Answers at once: what rank 0 receives reaches these ranks in collectives (``services/learner/share.py``)."""

    reason_to_wait = "rank 0 waits for the broker"

    def wait_welcome(self, timeout_s: float) -> Welcome | None:
        return None

    def tell(self, message: ToBroker) -> None:
        """Do nothing: rank 0 tells the broker."""

    def take(self, timeout_s: float) -> Answer | None:
        return None

    def publish(
        self,
        policy_version: int,
        weights: WeightCopy,
        trained_batches: int,
        vocabulary: int,
        note_digest: Callable[[str], None],
        experts: ModelExperts | None = None,
    ) -> None:
        raise AssertionError("only rank 0 has copies of the weights, and only it can publish them")

    def wait_for_room(self) -> None:
        """Return at once: this rank publishes nothing."""

    def acknowledged(self, next_batch: int) -> bool:
        """Return True: only rank 0 knows of missing reports."""
        return True

    def flush(self, timeout_s: float) -> bool:
        return True
