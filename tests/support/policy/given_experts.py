"""Experts that are not the routers' own choice of now: given, reported by an engine, or recorded and then mistaken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypedDict
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gspo.model.logprobs import TokenLogProbs
from gspo.model.packing import PackedBatch, TrainGroup, pack
from gspo.moe.experts import ExpertPicks, ExpertShape, num_differing
from gspo_services.learner.advantages import AdvantageSettings, sequences_with_advantages
from gspo_services.learner.engine.engine import LearnerEngine


class Replayed(TypedDict):
    """What came of one step with given experts."""

    loss: float
    misplaced: int
    """(Token, layer) pairs of this rank whose experts were not those that ought to be replayed."""
    exchanges: int
    """All-to-alls that this rank took part in."""


def given_picks(shape: ExpertShape, packed: PackedBatch) -> ExpertPicks:
    """Two experts for each token and layer with some, not the routers' choice; the same in every layout."""
    first_LT, number = packed.input_ids + torch.arange(shape.num_layers)[:, None], shape.num_experts
    return ExpertPicks(torch.stack([first_LT % number, (first_LT + 1) % number], dim=-1).to(torch.int8), number)


def swapped(picks: ExpertPicks) -> ExpertPicks:
    """The first two experts in each other's place."""
    numbers = torch.arange(picks.num_experts, dtype=picks.indices_LTK.dtype)
    numbers[:2] = numbers[:2].flip(0)
    return ExpertPicks(numbers[picks.indices_LTK.long()], picks.num_experts)


def replay_step(engine: LearnerEngine, groups: list[TrainGroup], *, swap: bool = False) -> Replayed:
    """One step in which the routers get their experts. ``swap``: by mistake two of them ``swapped``."""
    sequences, _ = sequences_with_advantages(groups, AdvantageSettings())
    together, shape = engine.sequence_parallel, ExpertShape.of(engine.model)
    packed = pack(sequences[engine.rank // together :: engine.world_size // together], policy_version=1)
    misplaced = 0

    def loss_fn(packed: PackedBatch, result: TokenLogProbs) -> Tensor:
        nonlocal misplaced
        assert result.experts is not None
        misplaced += int(num_differing(given_picks(shape, packed), result.experts).sum())
        return -(result.logprobs_T * packed.advantages_T).sum() / 100

    def recorded(packed: PackedBatch) -> ExpertPicks:
        picks = given_picks(shape, packed)
        return swapped(picks) if swap else picks

    with counting_exchanges() as exchanges:
        loss = engine.train_mini_batch([packed], loss_fn, replay=recorded).loss
    return Replayed(loss=loss, misplaced=misplaced, exchanges=len(exchanges))


@contextmanager
def counting_exchanges() -> Iterator[list[int]]:
    """Yield the sizes of this process's parts of all all-to-alls inside."""
    exchange, sizes = torch.distributed.all_to_all_single, list[int]()

    def counted(output: Tensor, input: Tensor, *args: object, **kwargs: object) -> object:  # noqa: A002 - torch's name
        sizes.append(input.nbytes)
        return exchange(output, input, *args, **kwargs)  # type: ignore[arg-type]

    with mock.patch.object(torch.distributed, "all_to_all_single", counted):
        yield sizes


def with_reported(groups: list[TrainGroup]) -> list[TrainGroup]:
    """The groups with two experts for each action token of every other sequence, not the routers' choice."""
    return [
        replace(
            group,
            sequences=tuple(
                sequence if index % 2 else replace(sequence, experts=_reported(sequence.token_ids[sequence.action_mask]))
                for index, sequence in enumerate(group.sequences, start=place)
            ),
        )
        for place, group in enumerate(groups)
    ]


def _reported(ids_A: NDArray[np.int64]) -> NDArray[np.int16]:
    first_AL = ids_A[:, None] + np.arange(2)
    return np.stack([first_AL % 4, (first_AL + 1) % 4], axis=-1).astype(np.int16)


def with_own_experts(engine: LearnerEngine, groups: list[TrainGroup], *, swap: bool = False) -> list[TrainGroup]:
    """The groups as an engine with the same weights would have sampled them; ``swap``: but with two experts ``swapped``.
    Collective."""
    found = []
    for group in groups:
        members = []
        for sequence in group.sequences:
            zeros = np.zeros(sequence.num_tokens, np.float32)
            packed = pack([sequence.with_advantages(zeros)], policy_version=1)
            picks = engine.logprobs(packed).experts
            assert picks is not None
            if swap:
                picks = swapped(picks)
            experts = picks.indices_LTK.transpose(0, 1).cpu()[packed.mask_T].numpy().astype(np.int16)
            members.append(replace(sequence, experts=experts))
        found.append(replace(group, sequences=tuple(members)))
    return found
