"""A trajectory's tokens as they grow: kind, turn, sequence, log-prob and version of each; how many are sent; how they are
resumed."""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Final

import msgpack
import numpy as np

from gspo_protocol.messages import Chunk, Journal, Lease, Plain, Segment, VersionRun
from gspo_protocol.messages.base import SegmentKind
from gspo_protocol.messages.journal import entries_in
from gspo_protocol.messages.pieces import pieces_in

OBSERVATION_VERSION: Final = -1
Arrays = dict[str, np.ndarray[Any, Any]]
Mark = tuple[SegmentKind, int, int]
"""Kind, turn and sequence of a token."""


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
        self.token_ids: list[int] = arrays["token_ids"].tolist()
        self._logprobs: list[float] = arrays["logprobs"].tolist()
        self._marks: list[Mark] = []
        for segment in pieces.segments:
            self._marks.extend([(segment.kind, segment.turn, segment.sequence)] * segment.num_tokens)
        self._versions: list[int] = []
        for run in pieces.version_runs:
            self._versions.extend([run.version] * run.num_tokens)
        self._num_sent = len(self.token_ids)
        self._num_rewards_sent = len(self.turn_rewards)
        self._sent_state = packed_state(lease.state)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_unsent(self) -> int:
        return len(self.token_ids) - self._num_sent

    def next_chunk(self) -> tuple[Chunk, Arrays] | None:
        """All tokens that were not sent yet, as a chunk; None when there are none. Call ``sent`` when it has been sent."""
        begin, end = self._num_sent, len(self.token_ids)
        if begin == end:
            return None
        segments = [
            Segment(kind, turn, sum(1 for _ in run), sequence)
            for (kind, turn, sequence), run in groupby(self._marks[begin:end])
        ]
        version_runs = [VersionRun(version, sum(1 for _ in run)) for version, run in groupby(self._versions[begin:end])]
        chunk = Chunk(
            trajectory_id=self.trajectory_id,
            epoch=self.epoch,
            offset=begin,
            num_tokens=end - begin,
            segments=segments,
            version_runs=version_runs,
            state=self.state if packed_state(self.state) != self._sent_state else None,
            turn_done=self.turn_done,
            turn_rewards=self.turn_rewards[self._num_rewards_sent :],
        )
        arrays: Arrays = {
            "token_ids": np.asarray(self.token_ids[begin:end], dtype=np.int32),
            "logprobs": np.asarray(self._logprobs[begin:end], dtype=np.float32),
        }
        return chunk, arrays

    def sent(self, chunk: Chunk) -> None:
        """``chunk`` is on its way: the next one begins after it."""
        self._num_sent = chunk.offset + chunk.num_tokens
        self._num_rewards_sent += len(chunk.turn_rewards)
        if chunk.state is not None:
            self._sent_state = packed_state(chunk.state)

    def _append(self, mark: Mark, token_ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]) -> None:
        if not len(token_ids) == len(logprobs) == len(versions):
            raise ValueError(
                f"{len(token_ids)} token ids, {len(logprobs)} log-probs and {len(versions)} versions: one of each per token"
            )
        self.token_ids.extend(token_ids)
        self._logprobs.extend(logprobs)
        self._versions.extend(versions)
        self._marks.extend([mark] * len(token_ids))


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
        mark = ("action", self.turn, 0)
        return [token for token, each in zip(self.token_ids, self._marks, strict=True) if each == mark]

    def observe(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the policy did not sample: prompt, tool answer, template."""
        num_tokens = len(token_ids)
        self._append(("observation", self.turn, 0), token_ids, [0.0] * num_tokens, [OBSERVATION_VERSION] * num_tokens)

    def act(self, token_ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]) -> None:
        """Append tokens that the engine sampled, each with its log-prob and policy version."""
        self._append(("action", self.turn, 0), token_ids, logprobs, versions)

    def end_turn(self, reward: float) -> None:
        """The environment has stepped: record the turn's reward and begin the next turn."""
        self.turn_rewards.append(reward)
        self.turn += 1
        self.turn_done = False

    @property
    def components(self) -> dict[str, float]:
        """The sum of each component over the turns."""
        names = sorted({name for each in self._components.values() for name in each})
        return {name: math.fsum(each.get(name, 0.0) for each in self._components.values()) for name in names}

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
