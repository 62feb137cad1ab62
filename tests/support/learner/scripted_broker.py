"""A learner's broker without a socket, and a batch for it."""

import threading
from collections.abc import Callable

import numpy as np

from protocol.messages import Batch, BatchItem, BatchRequest, Segment, VersionRun, Welcome
from protocol.messages.pieces import Pieces, piece_arrays
from services.learner.broker.batches import Answer, BatchArrived
from services.learner.broker.port import BrokerPort, ToBroker
from services.learner.weights.snapshot import WeightCopy
from tests.support.wire.zmq_ends import a_welcome


def a_training_batch(index: int, policy_version: int) -> tuple[Batch, dict[str, np.ndarray]]:
    """Four groups of two; one member of each is rewarded."""
    items, tokens, pieces = [], [], []
    random = np.random.default_rng(index)
    for group in range(4):
        for member in range(2):
            tokens.append(random.integers(0, 16, 6))
            segments = [Segment("observation", 0, 2), Segment("action", 0, 4)]
            runs = [VersionRun(-1, 2), VersionRun(policy_version, 4)]
            items.append(BatchItem(8 * index + 2 * group + member, 4 * index + group, 6, 2, 2, 1, "done"))
            pieces.append(Pieces(segments, runs, [float(member)]))
    arrays = {
        "token_ids": np.concatenate(tokens).astype(np.int32),
        "logprobs": np.full(48, -2.7, dtype=np.float32),
        **piece_arrays(pieces),
    }
    return Batch(index=index, policy_version=policy_version, temperature=1.0, items=items), arrays


class ScriptedBroker(BrokerPort):
    """Has ``num_batches``, acknowledges everything, and sets ``stop`` when a further batch is waited for."""

    reason_to_wait = ""

    def __init__(self, stop: threading.Event, num_batches: int) -> None:
        self._stop = stop
        self._num_batches = num_batches
        self._wanted: int | None = None

    def wait_welcome(self, timeout_s: float) -> Welcome | None:
        return a_welcome(policy_version=0)

    def tell(self, message: ToBroker) -> None:
        if isinstance(message, BatchRequest):
            self._wanted = message.index

    def take(self, timeout_s: float) -> Answer | None:
        wanted, self._wanted = self._wanted, None
        if wanted is None or wanted >= self._num_batches:
            self._stop.set()
            return None
        batch, arrays = a_training_batch(wanted, 1)
        return BatchArrived(batch=batch, arrays=arrays)

    def publish(
        self,
        policy_version: int,
        weights: WeightCopy,
        trained_batches: int,
        vocabulary: int,
        note_digest: Callable[[str], None],
    ) -> None:
        note_digest(weights.digest())

    def wait_announced(self) -> None: ...

    def acknowledged(self, next_batch: int) -> bool:
        return True

    def flush(self, timeout_s: float) -> bool:
        return True
