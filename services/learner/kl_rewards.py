"""The KL penalty of each episode, its distance from the reference model, that its reward loses before the advantages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gspo.inputs.validation import trusted_values
from gspo.model.logprobs import TokenLogProbs
from gspo.model.packing import PackedBatch, pack
from gspo.options.penalties import sequence_kl
from gspo.settings import Objective
from gspo_services.learner.engine import NonFiniteLossError
from gspo_services.learner.plan import BatchRows
from gspo_services.learner.sums import SummingRank, gathered_over_sequences


class ReferenceEngine(SummingRank, Protocol):
    """The methods of an engine that the penalty needs."""

    def logprobs(self, packed: PackedBatch, *, with_entropy: bool = False) -> TokenLogProbs: ...
    def reference_logprobs(self, packed: PackedBatch) -> Tensor: ...
    @property
    def shares_beginnings(self) -> bool: ...


def kl_penalties(
    engine: ReferenceEngine,
    rows: BatchRows,
    micro_batches: Sequence[Sequence[int]],
    objective: Objective,
    *,
    policy_version: int,
) -> NDArray[np.float64]:
    """Return kl_coefficient * sum of k_t of each episode, under the engine's present weights. Collective.

    ``micro_batches``: the rows of each of this rank's; over all ranks they hold the whole batch.

    It costs a forward pass of both models over the whole batch. Raises: NonFiniteLossError, on all ranks alike.
    """
    own_rows: list[int] = []
    found: list[Tensor] = []
    for members in micro_batches:
        unweighted = [rows.sequences[row].loaded().with_advantages(_zeros(rows.lengths[row])) for row in members]
        shared = rows.families(members) if engine.shares_beginnings else None
        packed = pack(unweighted, policy_version=policy_version, sequence_indices=members, families=shared)
        logprobs_T = engine.logprobs(packed).logprobs_T
        if packed.is_empty:
            continue
        reference_T = engine.reference_logprobs(packed)
        packed = packed.to(logprobs_T.device)
        with trusted_values():
            kl_S = sequence_kl(
                objective, logprobs_T, reference_T, packed.mask_T, packed.sequence_ids_T, packed.num_sequences
            )
        own_rows.extend(members)
        found.append(kl_S.double())
    own = torch.cat(found) if found else torch.zeros(0, dtype=torch.float64)
    rows_of_own = torch.tensor(own_rows, dtype=torch.int64)
    penalties = gathered_over_sequences(engine, len(rows.sequences), rows_of_own, own[:, None])[:, 0].numpy()
    if not np.isfinite(penalties).all():
        raise NonFiniteLossError("some log-probs of the batch's start or of the reference are not finite; no step was made")
    return np.asarray(np.bincount(rows.episode_ids, weights=penalties), dtype=np.float64)


def _zeros(length: int) -> NDArray[np.float32]:
    return np.zeros(length, dtype=np.float32)
