"""The datums of a call as rows for the engine, in their order: the same call always gives the same rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gspo_services.learner.engine import ClientRow
from gspo_services.serve.calls import ClientDatum


@dataclass(frozen=True, kw_only=True)
class DatumRow:
    """Some datums in one pass."""

    row: ClientRow
    datums: Sequence[ClientDatum]
    indices: Sequence[int]
    """Their places in the call."""
    offsets: Sequence[int]
    """[datums + 1]; where the log-probs of each begin."""


def rows_of(datums: Sequence[ClientDatum], max_tokens: int) -> Iterator[DatumRow]:
    """Yield rows of at most ``max_tokens`` tokens; a longer datum is alone in its own."""
    begin, num_tokens = 0, 0
    for index, datum in enumerate(datums):
        if index > begin and num_tokens + len(datum.tokens_N) > max_tokens:
            yield _row(datums, range(begin, index))
            begin, num_tokens = index, 0
        num_tokens += len(datum.tokens_N)
    yield _row(datums, range(begin, len(datums)))


def _row(datums: Sequence[ClientDatum], indices: range) -> DatumRow:
    chosen = [datums[index] for index in indices]
    lengths = [len(each.tokens_N) for each in chosen]
    ends = np.cumsum([0, *lengths])
    # Each of a token's K targets is predicted by the token itself.
    states = [
        np.repeat(np.arange(begin, end), each.targets.size // len(each.tokens_N))
        for each, begin, end in zip(chosen, ends[:-1], ends[1:], strict=True)
    ]
    row = ClientRow(
        input_ids=torch.from_numpy(np.concatenate([each.tokens_N for each in chosen]))[None],
        position_ids=torch.from_numpy(np.concatenate([np.arange(length) for length in lengths]))[None],
        ends=tuple(int(end) for end in ends),
        targets_M=torch.from_numpy(np.concatenate([each.targets.reshape(-1) for each in chosen])),
        states_M=torch.from_numpy(np.concatenate(states)),
    )
    offsets = [int(each) for each in np.cumsum([0, *(each.targets.size for each in chosen)])]
    return DatumRow(row=row, datums=chosen, indices=list(indices), offsets=offsets)
