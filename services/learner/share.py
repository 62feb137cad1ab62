"""Shares what rank 0 received with every rank: broadcasts a few numbers, then the encoded message. No pickle."""

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
import torch

from gspo_protocol.codec import decode, encode
from gspo_protocol.messages import Batch, BatchPart, EndOfRun, SkipBatch
from gspo_services.learner.broker import Answer, BatchAnnounced, PartArrived

WAIT: Final = 0
BATCH: Final = 1
END: Final = 2
STOP: Final = 3
SKIP: Final = 4
PART: Final = 5
MAX_SHARED_FRAMES: Final = 1 + max(
    len(Batch.ARRAYS) + len(Batch.OPTIONAL_ARRAYS), len(BatchPart.ARRAYS) + len(BatchPart.OPTIONAL_ARRAYS)
)
NO_FRAME: Final = -1

Directive = Answer | None
"""What to do next; None: stop, or nothing has arrived yet (see ``stop`` of ``share``)."""


class Broadcaster(Protocol):
    """The part of the engine that sharing needs."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def sum_over_ranks(self, tensor: torch.Tensor) -> torch.Tensor: ...
    def broadcast(self, tensor: torch.Tensor, *, source: int = 0) -> torch.Tensor: ...


def stop_anywhere(engine: Broadcaster, stop: bool) -> bool:
    """Return whether any rank was asked to stop: the signal may reach only one of several machines. Collective."""
    if engine.world_size == 1:
        return stop
    return bool(engine.sum_over_ranks(torch.tensor([int(stop)], dtype=torch.int64))[0])


def share(engine: Broadcaster, arrived: Directive, stop: bool) -> tuple[Directive, bool]:
    """Return rank 0's ``arrived``, and whether any rank was asked to stop, on every rank. Collective.

    The other ranks' ``arrived`` is ignored.
    """
    if engine.world_size == 1:
        return arrived, stop
    stop = stop_anywhere(engine, stop)
    frames = _frames(arrived) if engine.rank == 0 else []
    sizes = [len(frame) for frame in frames]
    kind = STOP if stop else _kind(arrived)
    head = torch.tensor([kind, *sizes, *[NO_FRAME] * (MAX_SHARED_FRAMES - len(sizes))], dtype=torch.int64)
    head = engine.broadcast(head)
    kind, *sizes = (int(number) for number in head.tolist())
    if kind in (WAIT, STOP):
        return None, kind == STOP
    sizes = [size for size in sizes if size != NO_FRAME]
    if engine.rank == 0:
        body = torch.from_numpy(np.frombuffer(b"".join(frames), dtype=np.uint8).copy())
    else:
        body = torch.empty(sum(sizes), dtype=torch.uint8)
    data = engine.broadcast(body).cpu().numpy()
    if engine.rank == 0:
        return arrived, False
    return _decode(data.tobytes(), sizes), False


def _kind(arrived: Directive) -> int:
    match arrived:
        case None:
            return WAIT
        case BatchAnnounced():
            return BATCH
        case PartArrived():
            return PART
        case SkipBatch():
            return SKIP
        case EndOfRun():
            return END


def _frames(arrived: Directive) -> Sequence[bytes]:
    if arrived is None:
        return []
    match arrived:
        case BatchAnnounced(batch=batch, arrays=arrays):
            encoded = encode(batch, arrays)
        case PartArrived(part=part, arrays=arrays):
            encoded = encode(part, arrays)
        case _:
            encoded = encode(arrived)
    return [bytes(frame) for frame in encoded]


def _decode(data: bytes, sizes: Sequence[int]) -> Directive:
    frames, offset = [], 0
    for size in sizes:
        frames.append(data[offset : offset + size])
        offset += size
    received = decode(frames)
    if isinstance(received.message, Batch):
        return BatchAnnounced(batch=received.message, arrays=received.arrays)
    if isinstance(received.message, BatchPart):
        return PartArrived(part=received.message, arrays=received.arrays)
    assert isinstance(received.message, SkipBatch | EndOfRun)
    return received.message
