"""The inputs of the loss: arguments checked, 0 wherever the mask is False, in one dtype, with their ratio units."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gspo.inputs.units import Units, ratio_units, segment_sum
from gspo.inputs.validation import (
    require_finite,
    require_ids,
    require_mask,
    require_not_negative,
    require_precise,
    require_vector,
    values_are_trusted,
)
from gspo.options.aggregation import episode_tokens
from gspo.settings import RatioUnit


@dataclass(frozen=True)
class LossInputs:
    """Inputs that are finite and have ids in range everywhere; only ``logp_T`` carries a gradient."""

    logp_T: Tensor
    anchor_T: Tensor
    advantages_T: Tensor
    mask_T: Tensor
    sequence_ids_T: Tensor
    units: Units
    counts_S: Tensor
    """Action tokens in the mask; 0 for an empty sequence."""
    num_tokens_S: Tensor
    """Before any rejection; 0 for an empty sequence."""
    episode_tokens_S: Tensor
    """n_i: those of the sequence's whole episode; the same where an episode is one sequence."""
    weights_S: Tensor

    @property
    def num_local(self) -> int:
        """Sequences of this micro-batch, empty ones included."""
        return self.num_tokens_S.shape[0]

    def mean_S(self, values_T: Tensor) -> Tensor:
        """Return the mean over each sequence's action tokens, of values that are 0 elsewhere; 0 for an empty sequence."""
        sums_S = segment_sum(values_T.to(self.logp_T.dtype), self.sequence_ids_T, self.num_local)
        return sums_S / self.counts_S.clamp(min=1)


def loss_inputs(
    logprobs_T: Tensor,
    anchor_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    sequence_ids_T: Tensor,
    turn_ids_T: Tensor | None,
    *,
    num_local: int,
    num_sequences: int,
    ratio_unit: RatioUnit,
    tokens_per_sequence_S: Tensor | None,
    mismatch_weights_S: Tensor | None,
    episode_ids_S: Tensor | None = None,
) -> LossInputs:
    """Check the arguments of ``gspo.loss.gspo_loss`` and raise its ValueErrors, which name argument, index and value."""
    _check(logprobs_T, anchor_logprobs_T, advantages_T, mask_T, sequence_ids_T, turn_ids_T, num_local)
    dtype = logprobs_T.dtype
    zero = logprobs_T.new_zeros(())
    ids_T = torch.where(mask_T, sequence_ids_T, 0).long()
    turns_T = None if turn_ids_T is None else torch.where(mask_T, turn_ids_T, 0)
    counts_S = segment_sum(mask_T.to(dtype), ids_T, num_local)
    of_episode_S = counts_S if episode_ids_S is None else episode_tokens(counts_S, episode_ids_S)
    of_episode_S = _tokens_per_sequence(tokens_per_sequence_S, of_episode_S)
    _check_num_sequences(num_sequences, counts_S, episode_ids_S)
    return LossInputs(
        logp_T=torch.where(mask_T, logprobs_T, zero),
        anchor_T=torch.where(mask_T, anchor_logprobs_T.detach().to(dtype), zero),
        advantages_T=torch.where(mask_T, advantages_T.detach().to(dtype), zero),
        mask_T=mask_T,
        sequence_ids_T=ids_T,
        units=ratio_units(ratio_unit, ids_T, turns_T, num_sequences=num_local),
        counts_S=counts_S,
        num_tokens_S=of_episode_S if episode_ids_S is None else counts_S,
        episode_tokens_S=of_episode_S,
        weights_S=_weights(mismatch_weights_S, counts_S),
    )


def _check(
    logprobs_T: Tensor,
    anchor_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    sequence_ids_T: Tensor,
    turn_ids_T: Tensor | None,
    num_local: int,
) -> None:
    if num_local == 0:
        raise ValueError("clip_range has 0 sequences; give an idle rank's micro-batch one sequence with an all-False mask")
    require_vector("logprobs_T", logprobs_T)
    length = logprobs_T.shape[0]
    require_vector("mask_T", mask_T, length)
    require_mask("mask_T", mask_T)
    for name, values in (
        ("logprobs_T", logprobs_T),
        ("anchor_logprobs_T", anchor_logprobs_T),
        ("advantages_T", advantages_T),
    ):
        require_vector(name, values, length)
        require_precise(name, values)
        require_finite(name, values.detach(), mask_T)
    require_vector("sequence_ids_T", sequence_ids_T, length)
    require_ids("sequence_ids_T", sequence_ids_T, num_local, mask_T)
    if turn_ids_T is not None:
        require_vector("turn_ids_T", turn_ids_T, length)


def _tokens_per_sequence(tokens_per_sequence_S: Tensor | None, counts_S: Tensor) -> Tensor:
    if tokens_per_sequence_S is None:
        return counts_S
    require_vector("tokens_per_sequence_S", tokens_per_sequence_S, counts_S.shape[0])
    missing = tokens_per_sequence_S < counts_S
    if not values_are_trusted() and bool(missing.any()):
        index = int(torch.nonzero(missing)[0, 0])
        raise ValueError(
            f"tokens_per_sequence_S[{index}] is {tokens_per_sequence_S[index].item()} but mask_T has "
            f"{int(counts_S[index])} action tokens there; give the number before any rejection"
        )
    return tokens_per_sequence_S.to(counts_S.dtype)


def _weights(mismatch_weights_S: Tensor | None, counts_S: Tensor) -> Tensor:
    if mismatch_weights_S is None:
        return torch.ones_like(counts_S)
    require_vector("mismatch_weights_S", mismatch_weights_S, counts_S.shape[0])
    require_finite("mismatch_weights_S", mismatch_weights_S)
    require_not_negative("mismatch_weights_S", mismatch_weights_S)
    return mismatch_weights_S.detach().to(counts_S.dtype)


def _check_num_sequences(num_sequences: int, counts_S: Tensor, episode_ids_S: Tensor | None) -> None:
    if not (math.isfinite(num_sequences) and num_sequences == int(num_sequences)):
        raise ValueError(f"num_sequences is {num_sequences}; give the whole number of sequences of the optimizer step")
    present, counted = 0, "sequences" if episode_ids_S is None else "episodes"
    if not values_are_trusted():
        with_tokens_S = counts_S > 0
        present = int(with_tokens_S.sum() if episode_ids_S is None else episode_ids_S[with_tokens_S].unique().numel())
    if num_sequences < max(present, 1):
        raise ValueError(
            f"num_sequences is {num_sequences} but this micro-batch alone has {present} {counted}; give the number of "
            f"{counted} of the whole optimizer step, over all ranks and micro-batches, before any rejection"
        )
