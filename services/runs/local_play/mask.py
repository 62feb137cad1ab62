"""Computes what the learner would make of each token of an episode: trained, context or discarded. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gspo_protocol.codec import Array
from gspo_protocol.messages import Chunk

Use = Literal["trained", "context", "discarded"]
"""trained: sampled, and in the loss. context: not sampled. discarded: sampled, and in no loss."""


@dataclass(kw_only=True)
class TokenRun:
    """Consecutive tokens of one sequence with the same use."""

    use: Use
    turn: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """At the sampling temperature; 0 where nothing was sampled."""


@dataclass(frozen=True, kw_only=True)
class Mask:
    """The tokens of an episode."""

    sequences: list[list[TokenRun]]

    def num_tokens(self, use: Use) -> int:
        """Return how many tokens have this use, in all sequences."""
        return sum(len(run.token_ids) for runs in self.sequences for run in runs if run.use == use)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max((sum(len(run.token_ids) for run in runs) for runs in self.sequences), default=0)


def mask_of(chunks: Iterable[tuple[Chunk, Mapping[str, Array]]], discarded_turns: Sequence[int] | None) -> Mask:
    """Compute the mask of an episode's chunks. ``discarded_turns``: None when nothing of the episode is trained on."""
    sequences: list[list[TokenRun]] = []
    for chunk, arrays in chunks:
        token_ids, logprobs = arrays["token_ids"].tolist(), arrays["logprobs"].tolist()
        at = 0
        for segment in chunk.segments:
            end = at + segment.num_tokens
            if segment.sequence == len(sequences):
                sequences.append([])
            run = _run(sequences[segment.sequence], _use(segment.kind, segment.turn, discarded_turns), segment.turn)
            run.token_ids += token_ids[at:end]
            run.logprobs += logprobs[at:end]
            at = end
    return Mask(sequences=sequences)


def _use(kind: str, turn: int, discarded_turns: Sequence[int] | None) -> Use:
    if kind == "observation":
        return "context"
    return "discarded" if discarded_turns is None or turn in discarded_turns else "trained"


def _run(runs: list[TokenRun], use: Use, turn: int) -> TokenRun:
    """Return the run that a segment continues, or a new one at the end of ``runs``."""
    if not runs or (runs[-1].use, runs[-1].turn) != (use, turn):
        runs.append(TokenRun(use=use, turn=turn))
    return runs[-1]
