"""One batch for all: groups of trajectories with long-tailed lengths, in this project's layout and in TRL's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gspo.model.packing import TrainGroup, TrainSequence

GROUP_SIZE = 8
PROMPT_TOKENS = 24
TEMPERATURE = 1.0


def long_tailed_lengths(num_sequences: int, longest: int, efficiency: float, seed: int = 0) -> NDArray[np.int64]:
    """Return answer lengths [S] up to ``longest``; with the prompt, their mean is ``efficiency`` of the longest.

    They are a log-normal sample, raised to the power that gives that mean: most are short, a few have the maximum length.
    Raises: ValueError for an efficiency that prompts alone exceed.
    """
    row = PROMPT_TOKENS + longest
    if not PROMPT_TOKENS + 1 < efficiency * row <= row:
        raise ValueError(f"efficiency is {efficiency}: prompts of {PROMPT_TOKENS} in rows of {row} cannot reach it")
    ranks = np.sort(np.random.default_rng(seed).lognormal(size=num_sequences))
    ranks /= ranks[-1]
    low, high = 0.0, 64.0
    for _ in range(60):
        power = (low + high) / 2
        mean = PROMPT_TOKENS + np.maximum(1, np.rint(longest * ranks**power)).mean()
        low, high = (power, high) if mean > efficiency * row else (low, power)
    lengths = np.maximum(1, np.rint(longest * ranks**high)).astype(np.int64)
    return np.random.default_rng(seed + 1).permutation(lengths)


def groups_of_lengths(lengths_S: NDArray[np.int64], vocabulary: int, seed: int = 0) -> list[TrainGroup]:
    """Return groups of GROUP_SIZE: prompts of PROMPT_TOKENS, answers of these lengths, random tokens and rewards."""
    generator = np.random.default_rng(seed)
    groups = []
    for start in range(0, len(lengths_S), GROUP_SIZE):
        prompt = generator.integers(0, vocabulary - 2, PROMPT_TOKENS)
        members = tuple(
            _sequence(prompt, generator.integers(0, vocabulary - 2, length), generator)
            for length in lengths_S[start : start + GROUP_SIZE]
        )
        rewards = generator.integers(0, 2, len(members)).astype(np.float64)
        rewards[0], rewards[-1] = 0.0, 1.0
        groups.append(TrainGroup(group_id=str(start // GROUP_SIZE), sequences=members, rewards=rewards))
    return groups


def _sequence(prompt: NDArray[np.int64], answer: NDArray[np.int64], generator: np.random.Generator) -> TrainSequence:
    tokens = np.concatenate([prompt, answer])
    on_answer = np.arange(len(tokens)) >= len(prompt)
    return TrainSequence(
        token_ids=tokens,
        action_mask=on_answer,
        behaviour_logprobs=np.where(on_answer, -generator.random(len(tokens)) - 5, 0).astype(np.float32),
        versions=np.where(on_answer, 0, -1),
        turn_ids=np.where(on_answer, 0, -1).astype(np.int32),
        temperature=TEMPERATURE,
    )


def num_tokens(groups: Sequence[TrainGroup]) -> int:
    """Return the number of real tokens, prompts included."""
    return sum(sequence.num_tokens for group in groups for sequence in group.sequences)


def padding_efficiency(groups: Sequence[TrainGroup]) -> float:
    """Return real tokens over tokens of rows padded to the longest."""
    lengths = [sequence.num_tokens for group in groups for sequence in group.sequences]
    return sum(lengths) / (len(lengths) * max(lengths))


def padded_micro_batches(
    groups: Sequence[TrainGroup], advantages: Any, num_micro_batches: int, pad: int
) -> list[dict[str, Any]]:
    """Return the inputs of GRPOTrainer's loss: rows padded to the batch's longest answer, in equal micro-batches."""
    members = [sequence for group in groups for sequence in group.sequences]
    longest = max(sequence.num_action_tokens for sequence in members)
    shape = (len(members), longest)
    completions, mask, old = np.full(shape, pad), np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.float32)
    for row, sequence in enumerate(members):
        size = sequence.num_action_tokens
        completions[row, :size] = sequence.token_ids[-size:]
        mask[row, :size] = 1
        old[row, :size] = sequence.behaviour_logprobs[-size:]
    whole = {
        "prompt_ids": torch.from_numpy(np.stack([sequence.token_ids[:PROMPT_TOKENS] for sequence in members])),
        "prompt_mask": torch.ones(len(members), PROMPT_TOKENS, dtype=torch.int64),
        "completion_ids": torch.from_numpy(completions),
        "completion_mask": torch.from_numpy(mask),
        "advantages": advantages,
        "old_per_token_logps": torch.from_numpy(old),
    }
    rows = len(members) // num_micro_batches
    return [{name: value[start : start + rows] for name, value in whole.items()} for start in range(0, len(members), rows)]
