"""Training sequences, and their packing into micro-batches.

Host side (numpy): ``TrainSequence`` and ``TrainGroup``, validated once when they are made. Device side (torch):
``PackedBatch``, several sequences end to end without padding. Every per-token tensor is shifted, so that index
t describes the token that follows it.

Letters in shapes: L tokens of one sequence, T tokens of a packed micro-batch, S sequences in it, M sequences of a batch,
G episodes of a group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gspo.model.beginnings import SharedRow, shared_row

_ARRAYS = {
    "token_ids": np.dtype(np.int64),
    "action_mask": np.dtype(np.bool_),
    "behaviour_logprobs": np.dtype(np.float32),
    "versions": np.dtype(np.int64),
    "turn_ids": np.dtype(np.int32),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainSequence:
    """One sequence of a finished episode: action tokens (from the policy) and observation tokens (prompt, tool, user turns).

    Outside the actions ``behaviour_logprobs`` is ignored, ``versions`` and ``turn_ids`` are -1. A sequence without any
    action token is legal: it counts in N and contributes nothing else.

    Raises: ValueError for arrays that do not fit together in type, length or values.
    """

    token_ids: NDArray[np.int64]
    """[L]"""
    action_mask: NDArray[np.bool_]
    """[L]; never set at index 0, because nothing predicts the first token."""
    behaviour_logprobs: NDArray[np.float32]
    """[L]; reported by the engine at the sampling temperature."""
    versions: NDArray[np.int64]
    """[L]; the policy version that made each action token."""
    turn_ids: NDArray[np.int32]
    """[L]; the turn, counted from 0, of each action token."""
    temperature: float
    """The sampling temperature; the learner divides its logits by it."""
    advantages: NDArray[np.float32] | None = None
    """[L]; None until the group's rewards have been turned into advantages."""
    adapter: int = 0
    """Which of the model's adapters sampled it, of those that are trained at once."""
    experts: NDArray[np.int16] | None = None
    """[action tokens, layers, k]; the experts of the pass in which the engine sampled each, -1 where they are not known."""

    def __post_init__(self) -> None:
        if self.num_tokens < 2:
            raise ValueError(f"token_ids has {self.num_tokens} tokens; a sequence needs a prompt token and one more")
        for name, dtype in _ARRAYS.items():
            self._check_array(name, self.__dict__[name], dtype)
        if self.advantages is not None:
            self._check_array("advantages", self.advantages, np.dtype(np.float32))
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(f"temperature is {self.temperature}; training needs a sampling temperature above 0")
        if self.adapter < 0:
            raise ValueError(f"adapter is {self.adapter}; adapters are counted from 0")
        if self.token_ids.min() < 0:
            raise ValueError(f"token_ids holds {self.token_ids.min()}; ids are not negative")
        if self.action_mask[0]:
            raise ValueError("action_mask is set at index 0; nothing predicts the first token, so it must be an observation")
        self._check_actions()
        if self.experts is not None and (self.experts.ndim != 3 or len(self.experts) != self.num_action_tokens):
            raise ValueError(
                f"experts is {list(self.experts.shape)}; it must be [{self.num_action_tokens}, layers, experts per token], "
                "one row per action token"
            )

    def _check_array(self, name: str, array: NDArray[np.generic], dtype: np.dtype[np.generic]) -> None:
        if array.dtype != dtype or array.shape != (self.num_tokens,):
            found = f"{array.dtype}{list(array.shape)}"
            raise ValueError(f"{name} is {found}; it must be {dtype}[{self.num_tokens}], one value per token id")
        if dtype == np.float32 and not np.isfinite(array).all():
            index = int(np.flatnonzero(~np.isfinite(array))[0])
            raise ValueError(f"{name}[{index}] is {array[index]}; only finite values can be trained on")

    def _check_actions(self) -> None:
        behaviour = self.behaviour_logprobs[self.action_mask]
        if (behaviour > 0).any():
            raise ValueError(f"behaviour_logprobs holds {behaviour.max()}; a log-probability is at most 0")
        for name in ("versions", "turn_ids"):
            array = self.__dict__[name]
            if (array[self.action_mask] < 0).any() or (array[~self.action_mask] != -1).any():
                raise ValueError(f"{name} must be >= 0 on action tokens and -1 elsewhere")

    @property
    def num_tokens(self) -> int:
        """Number of tokens: actions and observations."""
        return int(self.token_ids.shape[0])

    @property
    def num_action_tokens(self) -> int:
        """Number of tokens that the policy sampled."""
        return int(self.action_mask.sum())

    @property
    def oldest_version(self) -> int | None:
        """The oldest version that made an action token; None without any."""
        return min(self.versions[self.action_mask].tolist(), default=None)

    def loaded(self) -> TrainSequence:
        """Return this sequence: see ``BatchSequence``."""
        return self

    def with_advantages(self, advantages_L: NDArray[np.float32]) -> TrainSequence:
        """Return the same sequence with these advantages, [L].

        Raises: ValueError unless they are finite float32, one per token.
        """
        self._check_array("advantages", advantages_L, np.dtype(np.float32))
        other = copy(self)
        # ``replace`` would check all the other arrays again.
        object.__setattr__(other, "advantages", advantages_L)
        return other


class BatchSequence(Protocol):
    """A sequence of a batch, as every rank knows it. Only the rank that trains it need have its tokens."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_action_tokens(self) -> int: ...
    @property
    def oldest_version(self) -> int | None:
        """At most the oldest version that made an action token; None without any."""

    def loaded(self) -> TrainSequence:
        """Return the sequence with its tokens. Raises: ValueError when this rank does not have them."""


S_co = TypeVar("S_co", bound=BatchSequence, covariant=True)


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceGroup(Generic[S_co]):
    """The episodes sampled for one prompt, with their rewards. Groups enter and leave a batch whole."""

    group_id: str
    sequences: tuple[S_co, ...]
    """Those of the first episode, then those of the second, and so on."""
    rewards: NDArray[np.float64]
    """[G]; one reward per episode."""
    turn_rewards: tuple[NDArray[np.float64], ...] | None = None
    """The rewards of each episode's turns; None where credit goes to whole episodes."""
    turn_roles: tuple[NDArray[np.int64], ...] | None = None
    """The role that the policy played in each of these turns; None: it has one."""
    turn_discarded: tuple[NDArray[np.bool_], ...] | None = None
    """Which of these turns an attempt made that began again: they are compared with no others; None: none."""
    sequences_per_episode: tuple[int, ...] | None = None
    """[G]; None: each sequence is an episode of its own."""
    max_tokens: int | None = None
    """The most tokens that a sequence of the group could have when it was sampled; None: not known."""
    adapter: int = 0
    """Which adapter sampled it, of those that are trained at once."""

    def __post_init__(self) -> None:
        if not self.sequences:
            raise ValueError(f"group {self.group_id} has no sequences")
        size = self.num_episodes
        counts = self.sequences_per_episode
        if counts is not None and (min(counts, default=0) < 1 or sum(counts) != len(self.sequences)):
            raise ValueError(
                f"group {self.group_id}: sequences_per_episode is {counts}; give at least 1 for each episode, "
                f"{len(self.sequences)} together"
            )
        if self.rewards.shape != (size,) or not np.isfinite(self.rewards).all():
            raise ValueError(f"group {self.group_id}: rewards is {self.rewards}; give {size} finite values")
        if self.turn_rewards is None:
            return
        if len(self.turn_rewards) != size or not all(np.isfinite(rewards).all() for rewards in self.turn_rewards):
            raise ValueError(f"group {self.group_id}: turn_rewards needs {size} arrays of finite values, one per episode")

    @property
    def num_episodes(self) -> int:
        return len(self.sequences if self.sequences_per_episode is None else self.sequences_per_episode)


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainGroup(SequenceGroup[TrainSequence]):
    """A group whose sequences have their tokens."""


BatchGroup = SequenceGroup[BatchSequence]
"""A group of a batch of which this rank may have a part only."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedBatch:
    """S sequences end to end; index t of a ``_T`` tensor describes the target token t + 1 of the same sequence.

    The last index of each sequence has no target: ``mask_T`` is False there, and wherever the target is not an
    action token; the other per-token values are 0 there (``turn_ids_T`` and ``versions_T`` -1,
    ``temperatures_T`` the sequence's own).
    """

    input_ids: Tensor
    """int64 [1, T]"""
    position_ids: Tensor
    """int64 [1, T]; starts at 0 in each sequence."""
    cu_seqlens: tuple[int, ...]
    """[S + 1] boundaries of the sequences."""
    targets_T: Tensor
    mask_T: Tensor
    behaviour_T: Tensor
    advantages_T: Tensor
    sequence_ids_T: Tensor
    """int64; 0 .. S - 1"""
    turn_ids_T: Tensor
    temperatures_T: Tensor
    versions_T: Tensor
    """int64; the policy version that made each action token, -1 elsewhere."""
    sequence_indices: tuple[int, ...]
    """[S]; position of each sequence in the batch, for gathering results."""
    scored_N: Tensor
    """int64; where ``mask_T`` is set, known without a look at it."""
    shared: SharedRow | None = None
    """The same tokens, common beginnings once: what models that can share compute instead."""
    adapters_T: Tensor | None = None
    """int64; the adapter of each token's sequence. None: all have the first."""
    experts_TLK: Tensor | None = None
    """int16 [T, layers, k]; the experts with which the engine predicted the target, -1 where none are known."""

    @property
    def num_sequences(self) -> int:
        """Number of real sequences, S: 0 for the dummy of an empty micro-batch."""
        return len(self.sequence_indices)

    @property
    def num_tokens(self) -> int:
        """Number of real tokens: 0 for the dummy of an empty micro-batch."""
        return 0 if self.is_empty else int(self.input_ids.shape[1])

    @property
    def num_computed_tokens(self) -> int:
        """Of these, the tokens that a model computes: common beginnings once."""
        return self.num_tokens if self.shared is None else int(self.shared.input_ids.shape[1])

    @property
    def is_empty(self) -> bool:
        """Whether this is the dummy of an empty micro-batch."""
        return self.num_sequences == 0

    def to(self, device: torch.device) -> PackedBatch:
        """Return the same batch with its tensors on ``device``."""
        moved: dict[str, Any] = {
            name: value.to(device, non_blocking=True) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, shared=None if self.shared is None else self.shared.to(device), **moved)


def pack(
    sequences: Sequence[TrainSequence],
    *,
    policy_version: int,
    sequence_indices: Sequence[int] | None = None,
    families: Sequence[int] | None = None,
) -> PackedBatch:
    """Lay sequences end to end, targets shifted by one.

    Args:
        sequences: with advantages; an empty list gives a dummy of one token that joins collectives and trains nothing.
        policy_version: the learner's version at use; no token may be newer.
        sequence_indices: positions of the sequences in the batch; their own order when None.
        families: a number per sequence; neighbours of one number share the beginning that they have in common.

    Raises: ValueError for a sequence without advantages, or with a token newer than the learner.
    """
    indices = tuple(range(len(sequences))) if sequence_indices is None else tuple(sequence_indices)
    if len(indices) != len(sequences):
        raise ValueError(f"sequence_indices has {len(indices)} entries for {len(sequences)} sequences")
    if not sequences:
        return _dummy()
    advantages = []
    for index, sequence in zip(indices, sequences, strict=True):
        if sequence.advantages is None:
            raise ValueError(f"sequence {index} has no advantages; compute them for its group first")
        newest = sequence.versions.max()
        if newest > policy_version:
            raise ValueError(f"sequence {index} has a token of version {newest}, newer than the learner's {policy_version}")
        advantages.append(sequence.advantages)

    lengths = [sequence.num_tokens for sequence in sequences]
    ends = np.cumsum(lengths)

    def shifted(arrays: Sequence[NDArray[Any]], off: float) -> NDArray[Any]:
        """Lay the values end to end, each moved to the token before it; ``off`` at the end of a sequence."""
        row = np.concatenate(arrays)
        row[:-1] = row[1:]
        row[ends - 1] = off
        return row

    mask_T = shifted([sequence.action_mask for sequence in sequences], False)
    token_ids = [sequence.token_ids for sequence in sequences]

    def on_actions(arrays: Sequence[NDArray[Any]], off: float, dtype: type[np.generic]) -> Tensor:
        return torch.from_numpy(np.where(mask_T, shifted(arrays, off), off).astype(dtype, copy=False))

    return PackedBatch(
        input_ids=torch.from_numpy(np.concatenate(token_ids))[None],
        position_ids=torch.from_numpy(np.arange(ends[-1]) - np.repeat(ends - lengths, lengths))[None],
        cu_seqlens=(0, *ends.tolist()),
        targets_T=torch.from_numpy(shifted(token_ids, 0)),
        mask_T=torch.from_numpy(mask_T),
        behaviour_T=on_actions([sequence.behaviour_logprobs for sequence in sequences], 0.0, np.float32),
        advantages_T=on_actions(advantages, 0.0, np.float32),
        sequence_ids_T=torch.from_numpy(np.repeat(np.arange(len(sequences)), lengths)),
        turn_ids_T=on_actions([sequence.turn_ids for sequence in sequences], -1, np.int64),
        temperatures_T=torch.from_numpy(
            np.repeat(np.array([sequence.temperature for sequence in sequences], dtype=np.float32), lengths)
        ),
        versions_T=on_actions([sequence.versions for sequence in sequences], -1, np.int64),
        sequence_indices=indices,
        scored_N=torch.from_numpy(np.flatnonzero(mask_T)),
        adapters_T=_packed_adapters(sequences, lengths),
        experts_TLK=_packed_experts(sequences, mask_T),
        shared=None if families is None else shared_row(token_ids, families),
    )


def _packed_adapters(sequences: Sequence[TrainSequence], lengths: Sequence[int]) -> Tensor | None:
    if not any(sequence.adapter for sequence in sequences):
        return None
    return torch.from_numpy(np.repeat(np.array([sequence.adapter for sequence in sequences]), lengths))


def _packed_experts(sequences: Sequence[TrainSequence], mask_T: NDArray[np.bool_]) -> Tensor | None:
    """Put the experts of action tokens at the places that predict them. Raises: ValueError for those of several models."""
    shapes = {sequence.experts.shape[1:] for sequence in sequences if sequence.experts is not None}
    if not shapes:
        return None
    if len(shapes) > 1:
        raise ValueError(f"experts of {sorted(shapes)} [layers, experts per token] in one batch; give those of one model")
    experts = np.full((len(mask_T), *shapes.pop()), -1, dtype=np.int16)
    ends = np.cumsum([sequence.num_tokens for sequence in sequences])
    for sequence, end in zip(sequences, ends, strict=True):
        if sequence.experts is not None:
            own = slice(end - sequence.num_tokens, end)
            experts[own][mask_T[own]] = sequence.experts
    return torch.from_numpy(experts)


def _dummy() -> PackedBatch:
    zeros = torch.zeros(1, dtype=torch.int64)
    return PackedBatch(
        input_ids=zeros[None].clone(),
        position_ids=zeros[None].clone(),
        cu_seqlens=(0, 1),
        targets_T=zeros.clone(),
        mask_T=torch.zeros(1, dtype=torch.bool),
        behaviour_T=torch.zeros(1),
        advantages_T=torch.zeros(1),
        sequence_ids_T=zeros.clone(),
        turn_ids_T=zeros - 1,
        temperatures_T=torch.ones(1),
        versions_T=zeros - 1,
        sequence_indices=(),
        scored_N=zeros[:0].clone(),
    )
