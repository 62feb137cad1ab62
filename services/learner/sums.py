"""Sums over the ranks of a learner that count each sequence once."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class SummingRank(Protocol):
    """The part of an engine that counts over all ranks."""

    @property
    def rank(self) -> int: ...
    @property
    def sequence_parallel(self) -> int:
        """So many neighbouring ranks train the same sequences, each a slice of their tokens."""

    def sum_over_ranks(self, tensor: Tensor) -> Tensor: ...


def sum_over_sequences(engine: SummingRank, tensor: Tensor) -> Tensor:
    """Sum over all ranks the values of the sequences that each trains, counting each sequence once. Collective."""
    counts = engine.rank % engine.sequence_parallel == 0
    return engine.sum_over_ranks(tensor if counts else torch.zeros_like(tensor))


def gathered_over_sequences(engine: SummingRank, num_rows: int, rows: Tensor, own: Tensor) -> Tensor:
    """Return the table of all sequences of a batch, on the host, with one wait for the device. Collective.

    Args:
        num_rows: the sequences of the batch.
        rows: int64 [n], on the host: those that this rank knows; ``own``: [n, C], their values.
    """
    # The ranks that trained a sequence fill its row, and one of them counts; the others leave it 0. A sum then gathers all.
    table = own.new_zeros(num_rows, own.shape[1])
    table[rows.to(own.device, non_blocking=True)] = own
    return sum_over_sequences(engine, table).cpu()
