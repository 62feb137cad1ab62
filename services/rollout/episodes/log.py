"""The tokens of an agent's trajectory: several sequences that alternate in one log."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from gspo_protocol.messages import Lease
from gspo_services.rollout.trajectory import OBSERVATION_VERSION, TokenLog


class Round:
    """One call in its sequence: what was observed, and what was sampled after it."""

    def __init__(self, sequence: "TokenSequence", begin: int) -> None:
        self._sequence = sequence
        self.begin = begin
        """The first token of the observation, in the sequence."""
        self.action_begin = begin
        self.end = begin
        self.turn: int | None = None
        """That of the action; None while nothing was sampled."""

    @property
    def prompt_ids(self) -> list[int]:
        """Everything before the action: what the engine was given."""
        return self._sequence.token_ids[: self.action_begin]

    @property
    def action_ids(self) -> list[int]:
        return self._sequence.token_ids[self.action_begin : self.end]

    @property
    def logprobs(self) -> list[float]:
        """Of the action."""
        return self._sequence.logprobs[self.action_begin : self.end]


@dataclass(kw_only=True)
class TokenSequence:
    """Tokens that are each other's context."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    turn: int | None = None
    """The turn that the last token belongs to; None after an observation."""


class EpisodeLog(TokenLog):
    """Every token in the order in which it was appended, and each sequence by itself.

    Turns are numbered as they begin, in whichever sequence. A turn is complete when an observation follows in its sequence.
    Its reward is 0, because an agent's reward comes at the end.
    """

    def __init__(self, lease: Lease, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Start, or continue after the tokens that came with the lease."""
        super().__init__(lease, arrays)
        # An agent's state is the journal; the broker demands some state of every trajectory.
        self.state = {}
        self.turn_done = False
        self.sequences: list[TokenSequence] = []
        self.num_turns = 0
        self.num_segments = self.num_runs = 0
        """As the broker counts them: adjacent ones that are alike are one."""
        self._last: tuple[str, int] | None = None
        self._last_version: int | None = None
        self._restore()

    def observe(self, sequence: int, token_ids: Sequence[int]) -> Round:
        """Append what the policy did not sample; ``sequence`` is one that exists, or the next one."""
        if sequence < len(self.sequences) and self.sequences[sequence].turn is not None:
            self.turn_rewards.append(0.0)
        num_tokens = len(token_ids)
        versions = [OBSERVATION_VERSION] * num_tokens
        self._append(("observation", self.num_turns, sequence), token_ids, [0.0] * num_tokens, versions)
        return self._observed(sequence, token_ids)

    def act(self, sequence: int, token_ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]) -> None:
        """Append tokens that the engine sampled after everything that the sequence has."""
        if not token_ids:
            return
        turn = self.sequences[sequence].turn
        mark_turn = self.num_turns if turn is None else turn
        self._append(("action", mark_turn, sequence), token_ids, logprobs, versions)
        self._acted(sequence, token_ids, logprobs, versions)

    def _restore(self) -> None:
        at = 0
        for (kind, _, sequence), run in groupby(self._marks):
            end = at + sum(1 for _ in run)
            tokens = self.token_ids[at:end]
            if kind == "observation":
                self._observed(sequence, tokens)
            else:
                self._acted(sequence, tokens, self._logprobs[at:end], self._versions[at:end])
            at = end

    def _observed(self, sequence: int, token_ids: Sequence[int]) -> Round:
        if sequence == len(self.sequences):
            self.sequences.append(TokenSequence())
        each = self.sequences[sequence]
        if not each.rounds or each.rounds[-1].action_begin < each.rounds[-1].end:
            each.rounds.append(Round(each, len(each.token_ids)))
        self._count("observation", sequence, [OBSERVATION_VERSION], begins=False)
        each.token_ids.extend(token_ids)
        each.logprobs.extend([0.0] * len(token_ids))
        each.turn = None
        each.rounds[-1].action_begin = each.rounds[-1].end = len(each.token_ids)
        return each.rounds[-1]

    def _acted(self, sequence: int, token_ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]) -> None:
        each = self.sequences[sequence]
        self._count("action", sequence, versions, begins=each.turn is None)
        if each.turn is None:
            each.turn = each.rounds[-1].turn = self.num_turns
            self.num_turns += 1
        each.token_ids.extend(token_ids)
        each.logprobs.extend(logprobs)
        each.rounds[-1].end = len(each.token_ids)

    def _count(self, kind: str, sequence: int, versions: Sequence[int], *, begins: bool) -> None:
        self.num_segments += (kind, sequence) != self._last or begins
        self._last = (kind, sequence)
        for version in versions:
            self.num_runs += version != self._last_version
            self._last_version = version
