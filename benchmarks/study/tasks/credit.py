"""Advantages of the tokens of a batch: one for each answer, or one for each number of a chain.

A chain is lost with its first wrong number. So each number up to that one has a reward of its own, 1 if it is right and 0 if
not, and is compared with the same number of the group's other answers that got so far. What an answer says after its first
wrong number decides nothing, and has the advantage 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from benchmarks.study.tasks.countdown import right_chain
from gspo.advantages import group_advantages, turn_advantages
from gspo.model.packing import TrainSequence


class NumberGrades:
    """The rewards of one chain's numbers up to its first wrong one, and how many tokens a number has."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, problem: str, answer_ids: Sequence[int]) -> None:
        """Compare an answer to ``problem`` with the right one; every character is one token, and so is the end."""
        right_ids = [*tokenizer.encode(right_chain(problem), add_special_tokens=False), tokenizer.eos_token_id]
        same = next(
            (place for place, pair in enumerate(zip(answer_ids, right_ids, strict=False)) if pair[0] != pair[1]),
            min(len(answer_ids), len(right_ids)),
        )
        self.num_tokens = len(problem.partition("-")[0]) + 1
        """Of a number: its digits, and the blank or the end after it."""
        num_right = same // self.num_tokens
        self.rewards = [1.0] * num_right + [0.0] * (same < len(right_ids))


def answer_advantages(
    sequences: Sequence[TrainSequence], rewards: Sequence[float], group_ids: NDArray[np.int64]
) -> list[NDArray[np.float32]]:
    """Return the group-relative advantage of each sequence at each of its tokens, [L]; 0 outside the actions."""
    values = group_advantages(rewards, group_ids).advantages_M.numpy()
    return [
        np.where(sequence.action_mask, value, 0).astype(np.float32)
        for sequence, value in zip(sequences, values, strict=True)
    ]


def number_advantages(
    sequences: Sequence[TrainSequence], grades: Sequence[NumberGrades], group_ids: NDArray[np.int64]
) -> list[NDArray[np.float32]]:
    """Return each token its number's advantage, [L]; 0 after the first wrong number and outside the actions."""
    found = turn_advantages([grade.rewards for grade in grades], group_ids, credit="per_turn")
    filled = []
    for sequence, grade, values in zip(sequences, grades, found.advantages, strict=True):
        advantages_L = np.zeros(sequence.num_tokens, dtype=np.float32)
        places = np.flatnonzero(sequence.action_mask)
        spread = np.repeat(values.numpy(), grade.num_tokens)[: len(places)]
        advantages_L[places[: len(spread)]] = spread
        filled.append(advantages_L)
    return filled
