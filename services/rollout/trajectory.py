"""A trajectory's tokens as they grow: kind, turn, sequence, log-prob and version of each; how many are sent; how they are
resumed."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgpack
import numpy as np

from gspo_protocol.limits import MAX_CHUNK_FRAME_BYTES
from gspo_protocol.messages import Chunk, Journal, Lease, Plain, Segment, VersionRun
from gspo_protocol.messages.base import SegmentKind
from gspo_protocol.messages.experts import joined_experts
from gspo_protocol.messages.journal import entries_in
from gspo_protocol.messages.pieces import pieces_in
from gspo_services.rollout.sglang import OutputPiece
from gspo_services.rollout.tokens import Logprobs, Runs, TokenArrays, TokenIds
from gspo_services.tasks.environments import sum_of

OBSERVATION_VERSION: Final = -1
Arrays = dict[str, np.ndarray[Any, Any]]
Mark = tuple[SegmentKind, int, int]
"""Kind, turn and sequence of a token."""
ExpertParts = list[tuple[np.ndarray[Any, Any] | None, int]]
"""Experts of consecutive sampled tokens, None where they are not known, with the number of these tokens."""


class TokenLog:
    """Tokens that are only appended, and how many of them were sent to the broker."""

    def __init__(self, lease: Lease, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Start, or continue after the tokens that came with the lease."""
        self.trajectory_id = lease.trajectory_id
        self.epoch = lease.epoch
        self.state: Plain | None = lease.state
        self.turn_done = lease.turn_done
        pieces = pieces_in(arrays)
        self.turn_rewards = list(pieces.turn_rewards)
        self._tokens = TokenArrays()
        self._tokens.append(arrays["token_ids"], arrays["logprobs"])
        self._marks = Runs[Mark]()
        for segment in pieces.segments:
            self._marks.append((segment.kind, segment.turn, segment.sequence), segment.num_tokens)
        self._versions = Runs[int]()
        for run in pieces.version_runs:
            self._versions.append(run.version, run.num_tokens)
        self._num_sent = len(self._tokens)
        self._unsent_experts: ExpertParts = []
        """Of sampled tokens that are not sent; none for an evaluation, which is not trained on."""
        self._keeps_experts = lease.split == "train"
        self._num_rewards_sent = len(self.turn_rewards)
        self._sent_state = packed_state(lease.state)

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    @property
    def num_unsent(self) -> int:
        return len(self._tokens) - self._num_sent

    @property
    def token_ids(self) -> TokenIds:
        """All token ids, int32 [T]. What is appended later does not change the array."""
        return self._tokens.token_ids

    def next_chunk(self) -> tuple[Chunk, Arrays] | None:
        """Return the unsent tokens as a chunk, or as many of them as a message takes with their experts; None when there are
        none. Call ``sent`` once it is sent.
        """
        begin = self._num_sent
        if begin == len(self._tokens):
            return None
        end = self._end_of_room(begin)
        is_cut = end < len(self._tokens)
        segments = [Segment(kind, turn, num, sequence) for (kind, turn, sequence), num in self._marks.between(begin, end)]
        num_rewards = self._num_complete(end) if is_cut else len(self.turn_rewards)
        chunk = Chunk(
            trajectory_id=self.trajectory_id,
            epoch=self.epoch,
            offset=begin,
            num_tokens=end - begin,
            segments=segments,
            version_runs=[VersionRun(version, num) for version, num in self._versions.between(begin, end)],
            state=self.state if packed_state(self.state) != self._sent_state else None,
            turn_done=self.turn_done and not is_cut,
            turn_rewards=self.turn_rewards[self._num_rewards_sent : num_rewards],
        )
        arrays = {"token_ids": self._tokens.token_ids[begin:end], "logprobs": self._tokens.logprobs[begin:end]}
        experts = joined_experts(_divided(self._unsent_experts, _num_sampled(segments))[0])
        return chunk, arrays if experts is None else {**arrays, "experts": experts}

    def sent(self, chunk: Chunk) -> None:
        """``chunk`` is on its way: the next one begins after it."""
        self._num_sent = chunk.offset + chunk.num_tokens
        self._num_rewards_sent += len(chunk.turn_rewards)
        # What was appended while the chunk was on its way stays.
        self._unsent_experts = _divided(self._unsent_experts, _num_sampled(chunk.segments))[1]
        if chunk.state is not None:
            self._sent_state = packed_state(chunk.state)

    def _end_of_room(self, begin: int) -> int:
        """Where a chunk that begins there must end, so that a frame takes its experts: never within an observation, to the
        end of which the state belongs.
        """
        end = len(self._tokens)
        row = next((experts for experts, _ in self._unsent_experts if experts is not None), None)
        if row is None:
            return end
        room: int = MAX_CHUNK_FRAME_BYTES // math.prod(row.shape[1:])
        at = begin
        for (kind, _, _), num in self._marks.between(begin, end):
            if kind == "action":
                if num > room:
                    return at + room
                room -= num
            at += num
        return end

    def _num_complete(self, end: int) -> int:
        """How many turns the first ``end`` tokens complete: those that other tokens follow in their sequences."""
        num_turns, last = 0, dict[int, SegmentKind]()
        for (kind, turn, sequence), begin, _ in self._marks:
            if begin >= end:
                break
            last[sequence] = kind
            if kind == "action":
                num_turns = max(num_turns, turn + 1)
        return num_turns - list(last.values()).count("action")

    def _append_observed(self, mark: Mark, token_ids: Sequence[int]) -> tuple[TokenIds, Logprobs]:
        """Append tokens that the policy did not sample. Returns them as arrays, with their log-probs of 0."""
        observed, logprobs = np.array(token_ids, dtype=np.int32), np.zeros(len(token_ids), dtype=np.float32)
        self._tokens.append(observed, logprobs)
        self._versions.append(OBSERVATION_VERSION, len(token_ids))
        self._marks.append(mark, len(token_ids))
        return observed, logprobs

    def _append_sampled(self, mark: Mark, piece: OutputPiece) -> None:
        num_tokens, num_logprobs = len(piece.token_ids), len(piece.logprobs)
        num_versions = sum(run.num_tokens for run in piece.version_runs)
        if not num_tokens == num_logprobs == num_versions:
            raise ValueError(
                f"{num_tokens} token ids, {num_logprobs} log-probs and {num_versions} versions: one of each per token"
            )
        if self._keeps_experts and num_tokens:
            self._unsent_experts.append((piece.experts, num_tokens))
        self._tokens.append(piece.token_ids, piece.logprobs)
        for run in piece.version_runs:
            self._versions.append(run.version, run.num_tokens)
        self._marks.append(mark, num_tokens)


def _num_sampled(segments: Sequence[Segment]) -> int:
    return sum(each.num_tokens for each in segments if each.kind == "action")


def _divided(parts: ExpertParts, number: int) -> tuple[ExpertParts, ExpertParts]:
    """Those of the first ``number`` sampled tokens, and the rest."""
    first: ExpertParts = []
    rest: ExpertParts = []
    for experts, num in parts:
        taken = min(num, number)
        number -= taken
        if taken:
            first.append((None if experts is None else experts[:taken], taken))
        if taken < num:
            rest.append((None if experts is None else experts[taken:], num - taken))
    return first, rest


def packed_state(state: Plain | None) -> bytes:
    """What tells one state from another: it may be changed in place."""
    packed: bytes = msgpack.packb(state, use_bin_type=True)
    return packed


class Trajectory(TokenLog):
    """The tokens of an environment's episode, which has one sequence: its turns follow one another.

    ``turn_done``: the action of turn ``turn`` is complete and the environment's step is due.
    """

    def __init__(self, lease: Lease, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Start, or continue after the tokens that came with the lease."""
        super().__init__(lease, arrays)
        self.turn = len(self.turn_rewards)
        self._components: dict[int, dict[str, float]] = {}
        """Of each turn's reward; a turn that is graded again has those of the last time."""
        self._num_entries = 0
        for entry in entries_in(arrays):
            self._note(entry)

    @property
    def action_ids(self) -> list[int]:
        """Token ids of the current turn's action so far."""
        return self.action_of(self.turn)

    def action_of(self, turn: int) -> list[int]:
        """Token ids of the action of a turn."""
        mark, ids = ("action", turn, 0), self.token_ids
        return [token for each, begin, end in self._marks if each == mark for token in ids[begin:end].tolist()]

    def observe(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the policy did not sample: prompt, tool answer, template."""
        self._append_observed(("observation", self.turn, 0), token_ids)

    def act(self, piece: OutputPiece) -> None:
        """Append tokens that the engine sampled, each with its log-prob and policy version."""
        self._append_sampled(("action", self.turn, 0), piece)

    def end_turn(self, reward: float) -> None:
        """The environment has stepped: record the turn's reward and begin the next turn."""
        self.turn_rewards.append(reward)
        self.turn += 1
        self.turn_done = False

    @property
    def components(self) -> dict[str, float]:
        """The sum of each component over the turns; NaN where no float holds it."""
        names = sorted({name for each in self._components.values() for name in each})
        return {name: sum_of(each.get(name, 0.0) for each in self._components.values()) for name in names}

    def graded(self, components: Mapping[str, float]) -> Journal:
        """The current turn's reward has these components. Returns the entry that keeps them for whoever continues."""
        entry: Plain = {"turn": self.turn, "components": dict(components)}
        journal = Journal(trajectory_id=self.trajectory_id, epoch=self.epoch, place=self._num_entries, entry=entry)
        self._note(entry)
        return journal

    def _note(self, entry: Plain) -> None:
        self._num_entries += 1
        if isinstance(entry, dict) and isinstance(entry.get("turn"), int) and isinstance(entry.get("components"), dict):
            self._components[entry["turn"]] = entry["components"]
