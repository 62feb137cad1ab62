"""Answers to a BatchRequest, as rank 0 hands them to the training loop."""

from dataclasses import dataclass

from gspo_protocol.codec import Array
from gspo_protocol.messages import Batch, BatchPart, EndOfRun, SkipBatch


@dataclass(frozen=True, kw_only=True)
class BatchAnnounced:
    """What a batch consists of. Its parts follow in order; a SkipBatch in place of one means that none follows."""

    batch: Batch
    arrays: dict[str, Array]


@dataclass(frozen=True, kw_only=True)
class PartArrived:
    """The next part of the batch that was announced."""

    part: BatchPart
    arrays: dict[str, Array]


Answer = BatchAnnounced | PartArrived | SkipBatch | EndOfRun
"""A batch in parts, an order to skip it, or the end of the run."""
