"""Random training sequences and groups."""

from __future__ import annotations

import numpy as np

from gspo.packing import TrainGroup, TrainSequence


def random_sequence(
    length: int, seed: int, *, vocab_size: int = 16, versions: tuple[int, int] = (0, 0), temperature: float = 1.0
) -> TrainSequence:
    """A prompt of a third of `length` and then actions, a turn of five at a time.

    `versions`: lowest and highest version of the action tokens.
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


def random_groups(
    num_groups: int, group_size: int, seed: int, *, vocab_size: int = 16, versions: tuple[int, int] = (0, 0)
) -> list[TrainGroup]:
    """Groups of sequences of 4 to 40 tokens with random rewards, of turns as well."""
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
