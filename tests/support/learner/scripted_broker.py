"""A learner's broker without a socket, and a batch for it."""

import threading

import numpy as np

from gspo_protocol.messages import BatchRequest, Segment, VersionRun, Welcome
from gspo_protocol.messages.pieces import Pieces
from gspo_services.learner.broker.port import Answer, BatchAnnounced, BrokerPort, PartArrived, Publication, ToBroker
from tests.support.broker.made_batches import Made, MadeBatch, made_batch
from tests.support.wire.zmq_ends import ScriptedEnd, a_welcome


def a_training_batch(
    index: int, policy_version: int, *, bad_token: int | None = None, oldest: int | None = None
) -> MadeBatch:
    """Four groups of two, in one part; one member of each is rewarded.

    ``bad_token``: an id in place of one of them. ``oldest``: the version that made the tokens, if not ``policy_version``.
    """
    made = []
    random = np.random.default_rng(index)
    for group in range(4):
        for member in range(2):
            token_ids = random.integers(0, 16, 6).astype(np.int32)
            if bad_token is not None and not made:
                token_ids[5] = bad_token
            segments = [Segment("observation", 0, 2), Segment("action", 0, 4)]
            runs = [VersionRun(-1, 2), VersionRun(policy_version if oldest is None else oldest, 4)]
            made.append(
                Made(
                    trajectory_id=8 * index + 2 * group + member, group_id=4 * index + group, token_ids=token_ids,
                    logprobs=np.full(6, -2.7, dtype=np.float32), pieces=Pieces(segments, runs, [float(member)]),
                )
            )  # fmt: skip
    return made_batch(made, index=index, policy_version=policy_version)


async def send_batch(end: ScriptedEnd, made: MadeBatch) -> None:
    """Answer a BatchRequest: the batch, and its only part."""
    assert len(made.parts) == 1
    for message, arrays in made.messages():
        await end.reply(message, arrays)


def answers_of(made: MadeBatch) -> list[Answer]:
    """What rank 0 hands to the training loop."""
    announced = BatchAnnounced(batch=made.batch, arrays=made.arrays)
    return [announced, *(PartArrived(part=part, arrays=arrays) for part, arrays in made.parts)]


class ScriptedBroker(BrokerPort):
    """Has ``num_batches``, acknowledges everything, and sets ``stop`` when a further batch is waited for."""

    reason_to_wait = ""

    def __init__(self, stop: threading.Event, num_batches: int) -> None:
        self._stop = stop
        self._num_batches = num_batches
        self._answers: list[Answer] = []

    def wait_welcome(self, timeout_s: float) -> Welcome | None:
        return a_welcome(policy_version=0)

    def tell(self, message: ToBroker) -> None:
        if isinstance(message, BatchRequest):
            there_is_one = message.index < self._num_batches
            self._answers = answers_of(a_training_batch(message.index, 1)) if there_is_one else []

    def take(self, timeout_s: float) -> Answer | None:
        if not self._answers:
            self._stop.set()
            return None
        return self._answers.pop(0)

    def publish(self, publication: Publication) -> None:
        publication.note_digest(publication.weights.digest())

    def wait_for_room(self) -> None: ...

    def acknowledged(self, next_batch: int) -> bool:
        return True

    def flush(self, timeout_s: float) -> bool:
        return True
