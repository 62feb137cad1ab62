"""The tokens of an agent's trajectory: several sequences, interleaved in one log."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gspo_protocol.messages import Lease
from gspo_services.rollout.sglang import OutputPiece
from gspo_services.rollout.tokens import Logprobs, TokenArrays, TokenIds
from gspo_services.rollout.trajectory import TokenLog


class Round:
    """One call in its sequence: the observation, and the tokens sampled after it."""

    def __init__(self, sequence: "TokenSequence", begin: int) -> None:
        self._sequence = sequence
        self.begin = begin
        """The first token of the observation, in the sequence."""
        self.action_begin = begin
        self.end = begin
        self.turn: int | None = None
        """The number of the action; None before any token is sampled."""

    @property
    def prompt_ids(self) -> TokenIds:
        """Everything before the action: what the engine was given."""
        return self._sequence.token_ids[: self.action_begin]

    @property
    def action_ids(self) -> TokenIds:
        return self._sequence.token_ids[self.action_begin : self.end]

    @property
    def logprobs(self) -> Logprobs:
        """The action's log-probs."""
        return self._sequence.logprobs[self.action_begin : self.end]


class TokenSequence(TokenArrays):
    """Tokens that share one context."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds: list[Round] = []
        self.turn: int | None = None
        """The turn that the last token belongs to; None after an observation."""


class EpisodeLog(TokenLog):
    """All tokens in the order appended, and each sequence separately.

    Turns are numbered as they begin, in whichever sequence. A turn is complete when an observation follows in its sequence.
    Its reward is 0, because an agent's reward comes at the end.
    """

    def __init__(self, lease: Lease, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Start, or continue after the tokens that came with the lease."""
        super().__init__(lease, arrays)
        # An agent's state is the journal, but the broker requires some state of every trajectory.
        self.state = {}
        self.turn_done = False
        self.sequences: list[TokenSequence] = []
        self.num_turns = 0
        self._restore()

    @property
    def num_segments(self) -> int:
        """The segments as the broker counts them: equal neighbours are merged."""
        return len(self._marks)

    @property
    def num_runs(self) -> int:
        """The version runs, as the broker counts them."""
        return len(self._versions)

    def observe(self, sequence: int, token_ids: Sequence[int]) -> Round:
        """Append an observation; ``sequence`` is an existing one or the next."""
        if sequence < len(self.sequences) and self.sequences[sequence].turn is not None:
            self.turn_rewards.append(0.0)
        return self._observed(sequence, *self._append_observed(("observation", self.num_turns, sequence), token_ids))

    def act(self, sequence: int, piece: OutputPiece) -> None:
        """Append tokens that the engine sampled after the whole sequence."""
        if not len(piece.token_ids):
            return
        turn = self.sequences[sequence].turn
        self._append_sampled(("action", self.num_turns if turn is None else turn, sequence), piece)
        self._acted(sequence, piece.token_ids, piece.logprobs)

    def _restore(self) -> None:
        token_ids, logprobs = self._tokens.token_ids, self._tokens.logprobs
        for (kind, _, sequence), begin, end in self._marks:
            if kind == "observation":
                self._observed(sequence, token_ids[begin:end], logprobs[begin:end])
            else:
                self._acted(sequence, token_ids[begin:end], logprobs[begin:end])

    def _observed(self, sequence: int, token_ids: TokenIds, logprobs: Logprobs) -> Round:
        if sequence == len(self.sequences):
            self.sequences.append(TokenSequence())
        each = self.sequences[sequence]
        if not each.rounds or each.rounds[-1].action_begin < each.rounds[-1].end:
            each.rounds.append(Round(each, len(each)))
        each.append(token_ids, logprobs)
        each.turn = None
        each.rounds[-1].action_begin = each.rounds[-1].end = len(each)
        return each.rounds[-1]

    def _acted(self, sequence: int, token_ids: TokenIds, logprobs: Logprobs) -> None:
        each = self.sequences[sequence]
        if each.turn is None:
            each.turn = each.rounds[-1].turn = self.num_turns
            self.num_turns += 1
        each.append(token_ids, logprobs)
        each.rounds[-1].end = len(each)
