"""The sequences of a trajectory: which tokens are each other's context, as the audit spells them out for itself."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgpack
import msgspec
import numpy as np

from gspo_protocol.messages import Segment
from gspo_services.broker.store.payload import StoredChunk

NO_CONTEXT = 0
OBSERVED = -1
"""In place of a turn."""


def following(context: int, token_ids: Iterable[int]) -> int:
    """The context after these tokens: a fingerprint of everything before the next token, in order."""
    for token in token_ids:
        context = hash((context, token))
    return context


class Placed(NamedTuple):
    """A token of a trajectory, and its context."""

    token: int
    kind: str
    sequence: int
    context: int


class Turn(NamedTuple):
    """One answer as the trajectory has it."""

    turn: int
    sequence: int
    prompt_ids: list[int]
    """Everything before it."""
    token_ids: list[int]


class Sequences:
    """Grows with the trajectory."""

    def __init__(self) -> None:
        self.num_chunks = 0
        self._tokens: list[list[tuple[int, int]]] = []
        """Of each sequence: id and turn of each token."""
        self._contexts: list[int] = []

    def append(self, segments: Sequence[Segment], token_ids: Sequence[int]) -> list[Placed]:
        """A chunk's tokens, with the context of each."""
        placed: list[Placed] = []
        rest = iter(token_ids)
        for segment in segments:
            if segment.sequence == len(self._tokens):
                self._tokens.append([])
                self._contexts.append(NO_CONTEXT)
            turn = OBSERVED if segment.kind == "observation" else segment.turn
            for _ in range(segment.num_tokens):
                token, context = next(rest), self._contexts[segment.sequence]
                placed.append(Placed(token, segment.kind, segment.sequence, context))
                self._tokens[segment.sequence].append((token, turn))
                self._contexts[segment.sequence] = following(context, [token])
        self.num_chunks += 1
        return placed

    def append_chunk(self, chunk: StoredChunk) -> None:
        """The same for a chunk on disk."""
        segments = msgspec.convert(msgpack.unpackb(chunk.header, raw=False)[0], list[Segment])
        self.append(segments, np.frombuffer(chunk.token_ids, "<i4").tolist())

    def turns(self) -> list[Turn]:
        """All answers, in the order of the sequences, and in each in its order."""
        found: list[Turn] = []
        for sequence, tokens in enumerate(self._tokens):
            for place, (token, turn) in enumerate(tokens):
                if turn == OBSERVED:
                    continue
                if place and tokens[place - 1][1] == turn:
                    found[-1].token_ids.append(token)
                else:
                    found.append(Turn(turn, sequence, [each for each, _ in tokens[:place]], [token]))
        return found


def sequences_of(chunks: Iterable[StoredChunk], num_tokens: int) -> Sequences:
    """Those of the first ``num_tokens`` tokens of a trajectory."""
    found, left = Sequences(), num_tokens
    for chunk in chunks:
        if not left:
            break
        found.append_chunk(chunk)
        left -= chunk.num_tokens
    return found
