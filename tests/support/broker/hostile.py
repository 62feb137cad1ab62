"""A rollout with a key that says whatever the schema can express: mostly episodes, with something absurd in many of them."""

import random
from collections.abc import Sequence
from typing import Any, TypeVar

import msgpack
import numpy as np

from gspo_protocol.codec import Array
from gspo_protocol.messages.experts import UNKNOWN, ModelExperts, encode_experts
from gspo_services.broker.rows import NO_TURN, TrajectoryRow

T = TypeVar("T")

TOKEN_IDS = (16, 17, 2**31 - 1, -1)
LOGPROBS = (0.0, 1e-3, -1e4, -1.1e4, -3.4e38, 2.0, float("nan"), float("inf"), -float("inf"))
REWARDS = (1e6, -1e6, 5e5, 1.1e6, 1e300, 1.7e308, -1.7e308, float("nan"), float("inf"))
VERSIONS = (0, -1, 1, 2, 4, 2**31, 2**32, 2**53)
COUNTS = (0, -1, 1, 2, 63, 64, 2**31, 2**53, 2**53 + 1, 2**63)
SEQUENCES = (-1, 0, 1, 2, 255, 256, 2**31)
TURNS = (0, 1, 2, 5, 4096, 4097, 2**31)
EXPERTS = (
    ModelExperts(1, 1, 4),
    ModelExperts(2, 3, 4),
    ModelExperts(2, 2, 5),
    ModelExperts(2, 2, 255),
    ModelExperts(2, 2, 300),
)
"""Models beside one of two layers, two experts a token, and four experts."""
STATES: Sequence[Any] = (None, {}, {"deep": [[[[]]]]}, {"big": "x" * 300_000}, {"nan": float("nan")}, {"huge": 2**64 - 1})


class HostileRollout:
    """Makes the frames of chunks and finishes. ``oddity``: how often a field is not what it should be."""

    def __init__(
        self, rng: random.Random, vocabulary: int, newest_version: int, oddity: float, experts: ModelExperts | None = None
    ) -> None:
        """``experts``: those of the model, whose choices are sent; None: none are."""
        self._rng = rng
        self._vocabulary = vocabulary
        self._experts = experts
        self._newest = newest_version
        self._oddity = oddity
        self._branches = rng.choice([0.0, 0.3])
        """How often a new sequence begins."""

    def chunk(self, row: TrajectoryRow, seq: int) -> list[bytes]:
        """The frames of a chunk that goes on with the trajectory, more or less."""
        rng = self._rng
        turns, states = row.num_turns, [turn for _, turn in row.sequence_states]
        completed = turns - sum(turn != NO_TURN for turn in states)
        version = max(row.lease_version, 1)
        segments: list[list[Any]] = []
        runs: list[list[int]] = []
        for _ in range(rng.randint(1, 3)):
            # Most trajectories have one sequence.
            begins = not states or rng.random() < self._branches
            sequence = len(states) if begins else rng.randrange(len(states))
            states += [NO_TURN] * begins
            kind = self._or("observation" if begins else rng.choice(["action", "observation"]), ("action",))
            num = self._or(rng.randint(1, 3), (1, 2, 3))
            if kind == "action":
                turn = turns if states[sequence] == NO_TURN else states[sequence]
                turns = max(turns, turn + 1)
                states[sequence] = turn
                version = rng.randint(min(version, self._newest), self._newest)
                runs.append([self._or(version, VERSIONS), num])
            else:
                turn, states[sequence] = turns, NO_TURN
                runs.append([self._or(-1, VERSIONS), num])
            segments.append([kind, self._or(turn, TURNS), num, self._or(sequence, SEQUENCES)])
        num_tokens = sum(num for _, _, num, _ in segments)
        fields = {
            "trajectory_id": row.trajectory_id,
            "epoch": self._or(row.epoch, COUNTS),
            "offset": self._or(row.num_tokens, COUNTS),
            "num_tokens": self._or(num_tokens, COUNTS),
            "segments": segments,
            "version_runs": runs,
            "state": self._or({"at": row.num_tokens}, STATES),
            "turn_done": self._or(segments[-1][0] == "action", (True, False)),
            "turn_rewards": [self._reward() for _ in range(self._or(self._new(turns, states, completed), (0, 1, 2)))],
        }
        ids = [self._or(rng.randrange(self._vocabulary), TOKEN_IDS, 0.2) for _ in range(num_tokens)]
        logprobs = [self._or(-rng.random(), LOGPROBS, 0.2) for _ in range(num_tokens)]
        num_sampled = sum(num for kind, _, num, _ in segments if kind == "action")
        return self._frames("chunk", fields, seq, ids, logprobs, self._choices(num_sampled))

    def _choices(self, num_sampled: int) -> Array | None:
        """The experts of a chunk's sampled tokens, more or less; None: it has none."""
        if self._experts is None or self._rng.random() < 0.2:
            return None
        model = self._or(self._experts, EXPERTS, 3.0)
        shape = (self._or(num_sampled, (0, 1, num_sampled + 1)), model.num_layers, model.top_k)
        lowest = UNKNOWN if self._rng.random() < 0.2 else 0
        chosen = [self._rng.randrange(lowest, model.num_experts) for _ in range(shape[0] * shape[1] * shape[2])]
        return encode_experts(np.array(chosen, np.int32).reshape(shape), model.num_experts)

    def finish(self, row: TrajectoryRow, seq: int) -> list[bytes]:
        """The frames of a Finish, more or less."""
        rng = self._rng
        most = max(0, row.num_turns - 1)
        discarded = (
            sorted(rng.sample(range(row.num_turns), rng.randint(0, most))) if rng.random() < 3 * self._branches else []
        )
        rewards = [self._reward() for _ in range(self._or(row.num_turns, (0, 1, 2, 3)))]
        fields = {
            "trajectory_id": row.trajectory_id,
            "epoch": row.epoch,
            "num_tokens": self._or(row.num_tokens, COUNTS),
            "reason": rng.choice(["done", "length"]),
            "turn_rewards": [self._or(0.0, REWARDS) if turn in discarded else each for turn, each in enumerate(rewards)],
            "discarded_turns": [self._or(turn, TURNS) for turn in discarded],
            "components": {"right": self._reward()} if rng.random() < self._branches else {},
        }
        return self._frames("finish", fields, seq)

    def graded(self, row: TrajectoryRow, size: int, seq: int) -> list[bytes]:
        """The frames of a Graded for a group of this size, more or less."""
        rewards = [self._reward() for _ in range(self._or(size, (0, 1, 2, 4)))]
        fields = {
            "trajectory_id": row.trajectory_id,
            "epoch": self._or(row.epoch, COUNTS),
            "rewards": rewards,
            "components": [{"right": self._reward()} for _ in range(self._or(len(rewards), (0, 1, 2, 4)))],
        }
        return self._frames("graded", fields, seq)

    def _new(self, turns: int, states: list[int], completed: int) -> int:
        return turns - sum(turn != NO_TURN for turn in states) - completed

    def _reward(self) -> float:
        return self._or(self._rng.choice([0.0, 0.5, 1.0]), REWARDS)

    def _or(self, right: T, wrong: Sequence[T], times: float = 1.0) -> T:
        return self._rng.choice(wrong) if self._rng.random() < times * self._oddity else right

    def _frames(
        self,
        kind: str,
        fields: dict[str, Any],
        seq: int,
        ids: Sequence[int] = (),
        logprobs: Sequence[float] = (),
        experts: Array | None = None,
    ) -> list[bytes]:
        arrays = {"token_ids": np.array(ids, np.int32), "logprobs": np.array(logprobs, np.float32)} if ids else {}
        arrays |= {} if experts is None else {"experts": experts}
        described = [(name, str(array.dtype), array.shape) for name, array in arrays.items()]
        header = msgpack.packb({"m": {"type": kind, **fields}, "s": seq, "a": described})
        return [header, *(array.tobytes() for array in arrays.values())]
