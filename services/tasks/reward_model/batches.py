"""Which conversations the model reads together: neighbours in length, so that little is padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Each = TypeVar("Each")


def batches_of(waiting: Sequence[Each], length: Callable[[Each], int], most_tokens: int) -> Iterator[list[Each]]:
    """Batches of at most ``most_tokens``, padding included; one that is longer is alone."""
    batch: list[Each] = []
    for each in sorted(waiting, key=length):
        # Sorted, so this one sets the width of its batch.
        if batch and length(each) * (len(batch) + 1) > most_tokens:
            yield batch
            batch = []
        batch.append(each)
    if batch:
        yield batch
