"""Random training sequences and groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gspo.model.packing import TrainGroup, TrainSequence

_SEQUENCE_ARRAYS = ("token_ids", "action_mask", "behaviour_logprobs", "versions", "turn_ids")


def random_sequence(
    length: int, seed: int, *, vocab_size: int = 16, versions: tuple[int, int] = (0, 0), temperature: float = 1.0
) -> TrainSequence:
    """Return a prompt of a third of ``length``, then actions in turns of five.

    ``versions``: lowest and highest version of the action tokens.
    """
    generator = np.random.default_rng(seed)
    positions = np.arange(length)
    mask = positions >= max(1, length // 3)
    turns = (positions - max(1, length // 3)) // 5
    return TrainSequence(
        token_ids=generator.integers(0, vocab_size, length),
        action_mask=mask,
        behaviour_logprobs=np.where(mask, -generator.random(length) * 3, 0).astype(np.float32),
        versions=np.where(mask, generator.integers(versions[0], versions[1] + 1, length), -1),
        turn_ids=np.where(mask, turns, -1).astype(np.int32),
        temperature=temperature,
    )


def after_prompt(prompt: NDArray[np.int64], sequence: TrainSequence) -> TrainSequence:
    """The same sequence behind a prompt."""

    def longer(values: NDArray[Any], off: float) -> NDArray[Any]:
        return np.concatenate([np.full(len(prompt), off, values.dtype), values])

    return replace(
        sequence,
        token_ids=np.concatenate([prompt, sequence.token_ids]),
        action_mask=longer(sequence.action_mask, False),
        behaviour_logprobs=longer(sequence.behaviour_logprobs, 0.0),
        versions=longer(sequence.versions, -1),
        turn_ids=longer(sequence.turn_ids, -1),
    )


def every_token_an_action(sequence: TrainSequence) -> TrainSequence:
    """The same tokens, so that a learner computes the log-probs of all but the first; without advantages to speak of."""
    actions = np.arange(sequence.num_tokens) > 0
    return replace(
        sequence,
        action_mask=actions,
        versions=np.where(actions, 0, -1),
        turn_ids=np.where(actions, 0, -1).astype(np.int32),
        behaviour_logprobs=np.zeros(sequence.num_tokens, dtype=np.float32),
        advantages=np.zeros(sequence.num_tokens, dtype=np.float32),
    )


def random_groups(
    num_groups: int, group_size: int, seed: int, *, vocab_size: int = 16, versions: tuple[int, int] = (0, 0)
) -> list[TrainGroup]:
    """Return groups of sequences of 4 to 40 tokens with random rewards, also per turn."""
    generator = np.random.default_rng(seed)
    groups = []
    for index in range(num_groups):
        members = tuple(
            random_sequence(
                int(generator.integers(4, 40)), int(generator.integers(2**31)), vocab_size=vocab_size, versions=versions
            )
            for _ in range(group_size)
        )
        groups.append(
            TrainGroup(
                group_id=f"group-{index}",
                sequences=members,
                rewards=generator.random(group_size),
                turn_rewards=tuple(generator.random(int(member.turn_ids.max()) + 1) for member in members),
            )
        )
    return groups


def save_groups(path: Path, groups: Sequence[TrainGroup]) -> None:
    """Write groups, without turn rewards, for another process."""
    arrays: dict[str, NDArray[np.generic]] = {}
    for g, group in enumerate(groups):
        arrays[f"{g}/rewards"] = group.rewards
        for s, sequence in enumerate(group.sequences):
            arrays[f"{g}/{s}/temperature"] = np.array(sequence.temperature)
            for name in _SEQUENCE_ARRAYS:
                arrays[f"{g}/{s}/{name}"] = getattr(sequence, name)
    np.savez(path, **arrays)  # type: ignore[arg-type]


def load_groups(path: Path) -> list[TrainGroup]:
    """Read what ``save_groups`` wrote."""
    arrays = np.load(path, allow_pickle=False)
    groups: list[TrainGroup] = []
    while f"{len(groups)}/rewards" in arrays:
        g, rewards = len(groups), arrays[f"{len(groups)}/rewards"]
        members = tuple(
            TrainSequence(
                temperature=float(arrays[f"{g}/{s}/temperature"]),
                **{name: arrays[f"{g}/{s}/{name}"] for name in _SEQUENCE_ARRAYS},
            )
            for s in range(len(rewards))
        )
        groups.append(TrainGroup(group_id=f"group-{g}", sequences=members, rewards=rewards))
    return groups
