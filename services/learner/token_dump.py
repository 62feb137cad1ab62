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
from gspo.inputs.units import segment_sum
from gspo.loss import LossOutput
from gspo.model.logprobs import TokenLogProbs
from gspo.model.packing import BatchGroup, PackedBatch
from gspo_protocol.messages import Batch
from gspo_services.shared.settings import Settings
from gspo_services.shared.token_dump import TokenPart, write_part

log = structlog.get_logger()


@dataclass(frozen=True)
class _MicroBatch:
    """One micro-batch's values, kept on its device: to read them, or to select by the mask, the host would wait for it."""

    rows: tuple[int, ...]
    step: int
    stats_SC: Tensor
    """float64; the last column: trained tokens."""
    tokens_7T: Tensor
    """Rows: learner's log-prob, the start's, ratio, entropy, advantage, clip decision, 1 where a token is trained."""


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
            mask_T,
        )
        tokens_7T = torch.stack([column.detach().float() for column in columns])
        counts_S = segment_sum(mask_T.double(), torch.where(mask_T, packed.sequence_ids_T, 0), len(rows))
        self._kept.append(
            _MicroBatch(rows, step, torch.cat([output.stats.as_matrix(), counts_S[:, None]], dim=1), tokens_7T)
        )

    def write(self) -> None:
        """Write what was kept. A disk without room costs the dump, not the training."""
        try:
            write_part(self._run_directory, self._part(), rank=self._rank, world_size=self._world_size)
        except OSError as error:
            log.warning("tokens_not_dumped", batch=self._batch.index, error=str(error))

    def _part(self) -> TokenPart:
        rows = np.array([row for each in self._kept for row in each.rows], np.int64)
        columns = tuple(field.name for field in fields(SequenceStats))
        tokens_7T, stats_SC = np.zeros((7, 0), np.float32), np.zeros((0, len(columns) + 1))
        if self._kept:
            # Each read makes the host wait: one for all tokens, and one for all sequences.
            tokens_7T = torch.cat([each.tokens_7T for each in self._kept], dim=1).cpu().numpy()
            stats_SC = torch.cat([each.stats_SC for each in self._kept]).cpu().numpy()
        *values, trained_T = tokens_7T
        learner_T, start_T, ratio_T, entropy_T, advantage_T, clip_T = (value_T[trained_T > 0] for value_T in values)
        return TokenPart(
            batch=self._batch.index,
            policy_version=self._batch.policy_version,
            trajectories_S=self._trajectories_M[rows],
            places_S=self._places_M[rows],
            steps_S=np.repeat(
                np.array([each.step for each in self._kept], np.int64), [len(each.rows) for each in self._kept]
            ),
            counts_S=stats_SC[:, -1].astype(np.int64),
            columns=columns,
            stats_SC=stats_SC[:, :-1],
            learner_T=learner_T,
            start_T=start_T,
            ratio_T=ratio_T,
            entropy_T=entropy_T,
            advantage_T=advantage_T,
            clip_T=clip_T.astype(np.uint8),
        )
