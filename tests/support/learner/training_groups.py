"""A tiny model and groups for it whose behaviour log-probs are its own with engine noise."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gspo.model.packing import TrainSequence
from tests.support.learner.tiny_model import TINY_VOCAB_SIZE, save_tiny_model
from tests.support.loss.sequences import random_groups, save_groups

STILL = 1
"""The group whose rewards are all equal."""


def write_model_and_groups(directory: Path) -> None:
    """Write ``model/`` and ``groups.npz``."""
    torch.set_num_threads(1)
    model = save_tiny_model(directory / "model")
    groups = random_groups(5, 3, seed=1, vocab_size=TINY_VOCAB_SIZE, versions=(0, 1))
    generator = np.random.default_rng(2)
    noisy = []
    for group in groups:
        members = []
        for sequence, logprobs in zip(group.sequences, padded_logprobs(model, group.sequences), strict=True):
            noise = 0.03 * generator.standard_normal(sequence.num_tokens)
            behaviour = np.minimum(np.append(0, logprobs.detach().numpy()) + noise, 0)
            members.append(
                replace(sequence, behaviour_logprobs=np.where(sequence.action_mask, behaviour, 0).astype(np.float32))
            )
        noisy.append(replace(group, sequences=tuple(members)))
    # One without a signal: it shares its mini-batch with others.
    noisy[STILL] = replace(noisy[STILL], rewards=np.full(3, 0.5))
    save_groups(directory / "groups.npz", noisy)


def padded_logprobs(model: Any, sequences: Sequence[TrainSequence]) -> list[Tensor]:
    """Log-probs of each sequence's tokens 1 .. L - 1, by transformers' own forward on right-padded rows."""
    longest = max(sequence.num_tokens for sequence in sequences)
    input_ids = torch.full((len(sequences), longest), 5)
    attention_mask = torch.zeros(len(sequences), longest, dtype=torch.long)
    for row, sequence in enumerate(sequences):
        input_ids[row, : sequence.num_tokens] = torch.from_numpy(sequence.token_ids)
        attention_mask[row, : sequence.num_tokens] = 1
    log_softmax = torch.log_softmax(model(input_ids=input_ids, attention_mask=attention_mask).logits.float(), dim=-1)
    targets = [torch.from_numpy(sequence.token_ids[1:, None]) for sequence in sequences]
    return [log_softmax[row, : len(target)].gather(-1, target).squeeze(-1) for row, target in enumerate(targets)]
