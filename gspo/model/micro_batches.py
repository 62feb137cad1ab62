"""Spreads the sequences of a batch over ranks and micro-batches, from their lengths alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

PARTS_PER_RANK: Final = 2
"""Sequences of one family are spread over several ranks where they have more than such a part of all tokens."""


def plan_micro_batches(
    lengths: Sequence[int],
    max_tokens: int,
    num_ranks: int,
    *,
    max_sequence_tokens: int | None = None,
    families: Sequence[int] | None = None,
) -> list[list[list[int]]]:
    """Spread sequences over ranks and micro-batches: ``plan[rank][micro_batch]`` holds indices into ``lengths``.

    Every rank gets the same number of micro-batches, because each is a round of collectives; with too few sequences,
    some are empty. A micro-batch holds at most ``max_tokens`` tokens, but a longer
    sequence gets one for itself. Micro-batches of one round have similar sizes, because the slowest rank sets the
    pace. The plan depends only on the arguments.

    families: a number per sequence; neighbours of one number stay together, as far as they fit into a micro-batch and leave
    enough parts for all ranks. None: each sequence is placed by itself.

    Raises: ValueError for a sequence above ``max_sequence_tokens``.
    """
    _require_lengths(lengths, max_sequence_tokens)
    if max_tokens < 1 or num_ranks < 1:
        raise ValueError(f"max_tokens is {max_tokens} and num_ranks {num_ranks}; both must be at least 1")
    if families is None:
        return _spread(lengths, max_tokens, num_ranks)
    largest = min(max_tokens, sum(lengths) // (PARTS_PER_RANK * num_ranks) if num_ranks > 1 else max_tokens)
    units = _units(lengths, families, largest)
    plan = _spread([sum(lengths[index] for index in unit) for unit in units], max_tokens, num_ranks)
    return [[_flat(units[place] for place in members) for members in of_rank] for of_rank in plan]


def _require_lengths(lengths: Sequence[int], max_sequence_tokens: int | None) -> None:
    for index, length in enumerate(lengths):
        if max_sequence_tokens is not None and length > max_sequence_tokens:
            raise ValueError(
                f"sequence {index} has {length} tokens, above max_sequence_tokens = {max_sequence_tokens}, which is at most "
                "the model's positions; lower sampling.max_tokens"
            )


def _units(lengths: Sequence[int], families: Sequence[int], largest: int) -> list[list[int]]:
    """Neighbours of one family, of at most ``largest`` tokens together; a longer sequence is alone."""
    units: list[list[int]] = []
    room = 0
    for index, length in enumerate(lengths):
        if units and families[units[-1][0]] == families[index] and length <= room:
            units[-1].append(index)
        else:
            units.append([index])
            room = largest
        room -= length
    return units


def _spread(lengths: Sequence[int], max_tokens: int, num_ranks: int) -> list[list[list[int]]]:
    longest_first = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    bins = _first_fit(lengths, longest_first, max_tokens)
    num_bins = max(1, math.ceil(len(bins) / num_ranks)) * num_ranks
    levelled = _least_loaded(lengths, longest_first, max_tokens, num_bins)
    # Levelling can fail to find room where first-fit found it; keeping the number of bins matters more than even loads.
    bins = levelled if levelled is not None else bins + [[] for _ in range(num_bins - len(bins))]
    bins.sort(key=lambda members: (-sum(lengths[index] for index in members), members))
    plan: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    for start in range(0, num_bins, num_ranks):
        # Boustrophedon: the rank with the largest micro-batch of one round gets the smallest of the next.
        ranks = range(num_ranks) if start // num_ranks % 2 == 0 else reversed(range(num_ranks))
        for offset, rank in enumerate(ranks):
            plan[rank].append(sorted(bins[start + offset]))
    return plan


def _first_fit(lengths: Sequence[int], order: Sequence[int], max_tokens: int) -> list[list[int]]:
    bins: list[list[int]] = []
    loads: list[int] = []
    for index in order:
        for slot, load in enumerate(loads):
            if load + lengths[index] <= max_tokens:
                bins[slot].append(index)
                loads[slot] += lengths[index]
                break
        else:
            bins.append([index])
            loads.append(lengths[index])
    return bins


def _least_loaded(lengths: Sequence[int], order: Sequence[int], max_tokens: int, num_bins: int) -> list[list[int]] | None:
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = [0] * num_bins
    for index in order:
        slot = min(range(num_bins), key=lambda candidate: (loads[candidate], candidate))
        if bins[slot] and loads[slot] + lengths[index] > max_tokens:
            return None
        bins[slot].append(index)
        loads[slot] += lengths[index]
    return bins


def _flat(members: Iterable[Sequence[int]]) -> list[int]:
    return [index for each in members for index in each]
