"""Keeps the loss's values for each token of a batch, and writes one file per rank in the run's directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol

import numpy as np
import structlog
import torch
from torch import Tensor

from gspo.diagnostics import SequenceStats
from gspo.loss import LossOutput
from gspo.model.logprobs import TokenLogProbs
from gspo.model.packing import BatchGroup, PackedBatch
from gspo_protocol.messages import Batch
from gspo_services.shared.settings import Settings
from gspo_services.shared.token_dump import TokenPart, write_part

log = structlog.get_logger()


@dataclass(frozen=True)
class _MicroBatch:
    """One micro-batch's values, kept on its device: reading each at once would make the host wait."""

    rows: tuple[int, ...]
    step: int
    counts_S: Tensor
    stats_SC: Tensor
    tokens_6T: Tensor
    """Rows: learner's log-prob, the start's, ratio, entropy, advantage, clip decision; columns: trained tokens."""


class Ranks(Protocol):
    """The part of the engine that says which rank this is."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...


class TokenDump:
    """One batch on one rank: told of each micro-batch in its training, then written."""

    def __init__(
        self, run_directory: Path, batch: Batch, groups: Sequence[BatchGroup], *, rank: int, world_size: int
    ) -> None:
        """``groups``: those of the whole batch, whose sequences are numbered in their order."""
        self._run_directory = run_directory
        self._batch = batch
        self._rank = rank
        self._world_size = world_size
        sizes = [size for group in groups for size in group.sequences_per_episode or [1] * len(group.sequences)]
        # Items keep a group's members together and in order, as ``Assembly`` does.
        by_group: dict[int, list[int]] = {}
        for item in batch.items:
            by_group.setdefault(item.group_id, []).append(item.trajectory_id)
        trajectories = [trajectory for members in by_group.values() for trajectory in members]
        self._trajectories_M = np.repeat(np.array(trajectories, np.int64), sizes)
        self._places_M = np.concatenate([np.arange(size, dtype=np.int64) for size in sizes])
        self._kept: list[_MicroBatch] = []

    @classmethod
    def wanted(cls, settings: Settings, ranks: Ranks, batch: Batch, groups: Sequence[BatchGroup]) -> TokenDump | None:
        """A dump if the run wants one; of several ranks that train the same sequences, one has it."""
        together = settings.learner.sequence_parallel
        if not settings.learner.dump_tokens or ranks.rank % together:
            return None
        rank, world_size = ranks.rank // together, ranks.world_size // together
        return cls(settings.run.directory, batch, groups, rank=rank, world_size=world_size)

    def add(
        self,
        rows: tuple[int, ...],
        step: int,
        packed: PackedBatch,
        learner: TokenLogProbs,
        start_T: Tensor | None,
        output: LossOutput,
    ) -> None:
        """Keep one micro-batch, on its device.

        ``rows``: its sequences' places in the batch. ``step``: the optimizer step of the batch. ``start_T``: the log-probs
        of the batch's starting weights, if they are computed.
        """
        assert output.tokens is not None
        mask_T = packed.mask_T
        unknown_T = torch.full_like(learner.logprobs_T, float("nan"))
        clip_T = output.tokens.clipped_high.float() + 2 * output.tokens.clipped_low.float()
        columns = (
            learner.logprobs_T,
            unknown_T if start_T is None else start_T,
            output.tokens.ratio,
            unknown_T if learner.entropies_T is None else learner.entropies_T,
            packed.advantages_T,
            clip_T,
        )
        counts_S = torch.zeros(len(rows), dtype=torch.int64, device=mask_T.device)
        counts_S.index_add_(0, packed.sequence_ids_T[mask_T].long(), torch.ones_like(packed.sequence_ids_T[mask_T].long()))
        tokens_6T = torch.stack([column.detach().float()[mask_T] for column in columns])
        self._kept.append(_MicroBatch(rows, step, counts_S, output.stats.as_matrix(), tokens_6T))

    def write(self) -> None:
        """Write what was kept. A disk without room costs the dump, not the training."""
        try:
            write_part(self._run_directory, self._part(), rank=self._rank, world_size=self._world_size)
        except OSError as error:
            log.warning("tokens_not_dumped", batch=self._batch.index, error=str(error))

    def _part(self) -> TokenPart:
        rows = np.array([row for each in self._kept for row in each.rows], np.int64)
        columns = tuple(field.name for field in fields(SequenceStats))
        tokens_6T = np.concatenate([np.zeros((6, 0), np.float32), *(each.tokens_6T.cpu().numpy() for each in self._kept)], 1)
        learner_T, start_T, ratio_T, entropy_T, advantage_T, clip_T = tokens_6T
        return TokenPart(
            batch=self._batch.index,
            policy_version=self._batch.policy_version,
            trajectories_S=self._trajectories_M[rows],
            places_S=self._places_M[rows],
            steps_S=np.repeat(
                np.array([each.step for each in self._kept], np.int64), [len(each.rows) for each in self._kept]
            ),
            counts_S=np.concatenate([np.zeros(0, np.int64), *(each.counts_S.cpu().numpy() for each in self._kept)]),
            columns=columns,
            stats_SC=np.concatenate([np.zeros((0, len(columns))), *(each.stats_SC.cpu().numpy() for each in self._kept)]),
            learner_T=learner_T,
            start_T=start_T,
            ratio_T=ratio_T,
            entropy_T=entropy_T,
            advantage_T=advantage_T,
            clip_T=clip_T.astype(np.uint8),
        )
