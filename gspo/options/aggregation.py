"""How the terms of tokens become one number: what each sequence's sum over its tokens is divided by.

    J = 1/N * sum_i 1/D_i * sum_{t in A_i} term_t

    "sequence"  D_i = n_i    mean over the sequence, then over sequences: GSPO (arXiv 2507.18071), GRPO (arXiv 2402.03300)
    "token"     D_i = M / N  mean over the step's tokens: DAPO (arXiv 2503.14476, eq. 8)
    "constant"  D_i = L      a constant length: Dr. GRPO (arXiv 2503.20783, section 3.2)

N, M and L belong to the whole optimizer step: its sequences and action tokens over all ranks and micro-batches, before
anything is rejected, and a length that does not change. So the losses of micro-batches add up, whatever the split.

With episodes of several sequences N counts episodes, and n_i is the number of action tokens of the whole episode: an episode
whose context was broken weighs as much as one that is a single sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gspo.inputs.units import numbered, segment_sum
from gspo.inputs.validation import require_ids, require_vector, values_are_trusted
from gspo.settings import Aggregation, require_number

MAX_EPISODE_ID = 2**53


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """The aggregation of one optimizer step."""

    aggregation: Aggregation = "sequence"
    num_tokens: int | None = None
    """M; for "token" only."""
    length: int | None = None
    """L; for "constant" only."""

    def __post_init__(self) -> None:
        """Raises: ValueError for a number that is missing, is out of range, or belongs to another aggregation."""
        for name, value, owner in (("num_tokens", self.num_tokens, "token"), ("length", self.length, "constant")):
            if value is None and self.aggregation == owner:
                raise ValueError(_MISSING[owner])
            if value is None:
                continue
            if self.aggregation != owner:
                raise ValueError(f"{name} is {value} with aggregation {self.aggregation!r}; only {owner!r} divides by it")
            require_number(name, value, low=1.0)

    def divisors(self, num_tokens_S: Tensor, num_sequences: int) -> Tensor | float:
        """Return D_i, at least 1 for an empty sequence. num_tokens_S: n_i. num_sequences: N."""
        if self.num_tokens is not None:
            # The caller divides by N as well.
            return self.num_tokens / num_sequences
        if self.length is not None:
            return float(self.length)
        return num_tokens_S.clamp(min=1)

    def require_tokens(self, counts_S: Tensor) -> None:
        """Raises: ValueError if this micro-batch alone has more action tokens than the step."""
        if self.num_tokens is None or values_are_trusted():
            return
        present = int(counts_S.sum())
        if self.num_tokens < present:
            raise ValueError(
                f"num_tokens is {self.num_tokens} but this micro-batch alone has {present} action tokens; give the number "
                "of action tokens of the whole optimizer step, over all ranks and micro-batches, before any rejection"
            )


PER_SEQUENCE = Reduction()

_MISSING = {
    "token": (
        "num_tokens is missing with aggregation 'token'; give the number of action tokens of the whole optimizer step, over "
        "all ranks and micro-batches, before any rejection"
    ),
    "constant": (
        "length is missing with aggregation 'constant'; give the length that every sequence's sum is divided by, such as "
        "the most tokens of an answer"
    ),
}


def episode_tokens(num_tokens_S: Tensor, episode_ids_S: Tensor) -> Tensor:
    """Return n_i of each sequence's episode: the action tokens of all its sequences, which must be in this micro-batch.

    num_tokens_S: action tokens of each sequence. episode_ids_S: int64, any numbers from 0 to 2**53; sequences of one episode
    have the same. For an episode that is split over micro-batches give its n_i as ``tokens_per_sequence_S`` of the loss.
    Raises: ValueError for another shape, type or a negative id.
    """
    require_vector("episode_ids_S", episode_ids_S, num_tokens_S.shape[0])
    require_ids("episode_ids_S", episode_ids_S, MAX_EPISODE_ID)
    index_S = numbered(episode_ids_S)
    return segment_sum(num_tokens_S, index_S, num_tokens_S.shape[0])[index_S]
