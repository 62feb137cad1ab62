"""Subtracts a KL penalty, the distance from the reference model, from rewards before the advantages are computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from gspo.inputs.validation import trusted_values
from gspo.model.logprobs import TokenLogProbs
from gspo.model.packing import BatchGroup, PackedBatch, episode_ids, pack
from gspo.options.penalties import sequence_kl
from gspo.settings import Objective
from gspo_services.learner.engine import NonFiniteLossError
from gspo_services.learner.plan import SummingRank, gathered_over_sequences, group_of_rows, own_micro_batches, shared_by


class ReferenceEngine(SummingRank, Protocol):
    """The methods of an engine that the penalty needs."""

    def logprobs(self, packed: PackedBatch, *, with_entropy: bool = False) -> TokenLogProbs: ...
    def reference_logprobs(self, packed: PackedBatch) -> Tensor: ...


def with_kl_rewards(
    engine: ReferenceEngine, groups: Sequence[BatchGroup], objective: Objective, *, policy_version: int
) -> list[BatchGroup]:
    """Return the groups with rewards r_i - kl_coefficient * sum of k_t, under the engine's present weights. Collective.

    It costs a forward pass of both models over the whole batch. Raises: NonFiniteLossError, on all ranks alike.
    """
    members = [sequence for group in groups for sequence in group.sequences]
    rows: list[int] = []
    found: list[Tensor] = []
    families = group_of_rows(groups)
    for indices in own_micro_batches(engine, [sequence.num_tokens for sequence in members], families):
        unweighted = [members[index].loaded().with_advantages(_zeros(members[index].num_tokens)) for index in indices]
        shared = shared_by(engine, [families[index] for index in indices])
        packed = pack(unweighted, policy_version=policy_version, sequence_indices=indices, families=shared)
        logprobs_T = engine.logprobs(packed).logprobs_T
        if packed.is_empty:
            continue
        reference_T = engine.reference_logprobs(packed)
        packed = packed.to(logprobs_T.device)
        with trusted_values():
            kl_S = sequence_kl(
                objective, logprobs_T, reference_T, packed.mask_T, packed.sequence_ids_T, packed.num_sequences
            )
        rows.extend(indices)
        found.append(kl_S.double())
    own = torch.cat(found) if found else torch.zeros(0, dtype=torch.float64)
    rows_of_own = torch.tensor(rows, dtype=torch.int64)
    penalties = gathered_over_sequences(engine, len(members), rows_of_own, own[:, None])[:, 0].numpy()
    if not np.isfinite(penalties).all():
        raise NonFiniteLossError("some log-probs of the batch's start or of the reference are not finite; no step was made")
    of_episodes = np.bincount(episode_ids(groups), weights=penalties)
    starts = accumulate((group.num_episodes for group in groups), initial=0)
    return [
        replace(group, rewards=group.rewards - of_episodes[start : start + group.num_episodes])
        for group, start in zip(groups, starts, strict=False)
    ]


def _zeros(length: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.zeros(length, dtype=np.float32)
