"""One packed row on several ranks (Ulysses, arXiv 2309.14509): each has a slice of its tokens; in attention, of heads.

Around attention per segment, an all-to-all gives each rank all tokens of its own heads, and another one brings them back.
Everything else of a layer treats each token alone. Log-probs come back whole, because a GSPO ratio needs whole sequences:

    every rank computes the loss L of the whole row, in which only its own slice of the log-probs has a gradient;
    the sum over ranks of dL/dw is then the gradient of one rank that has the whole row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.nn.functional import pad

from gspo.model.boundaries import Boundaries
from gspo.model.logprobs import TokenLogProbs
from gspo.model.packing import PackedBatch
from gspo.moe.experts import ExpertPicks


@dataclass(frozen=True)
class RowShare:
    """A rank's slice of the rows of a process group, whose ranks have the same rows: slice ``index`` of ``size``."""

    group: Any
    index: int
    size: int

    def inputs(self, packed: PackedBatch) -> dict[str, Any]:
        """Return the arguments of the model's forward pass: this rank's slice of the tokens, and the boundaries of all
        segments.

        A row that does not divide gets one more segment, of at most ``size`` - 1 tokens.
        """
        num_tokens = packed.input_ids.shape[1]
        missing = -num_tokens % self.size
        positions = torch.arange(missing, device=packed.position_ids.device)[None]
        return {
            "input_ids": self.own_row(packed.input_ids),
            "position_ids": self._slice(torch.cat([packed.position_ids, positions], dim=1)),
            "cu_seqlens": Boundaries(packed.cu_seqlens + ((num_tokens + missing,) if missing else ())),
            "targets_T": self.own_row(packed.targets_T),
            "temperatures_T": self.own_row(packed.temperatures_T, 1.0),
            "row_share": self,
        }

    def whole(self, result: TokenLogProbs, num_tokens: int) -> TokenLogProbs:
        """Return the log-probs, entropies and experts of the whole row. Only this rank's slice has a gradient.

        Collective.
        """
        entropies, experts, own = result.entropies_T, result.experts, result.own_experts
        return result._replace(
            logprobs_T=self._joined(result.logprobs_T)[:num_tokens],
            entropies_T=None if entropies is None else self._joined(entropies)[:num_tokens],
            experts=None if experts is None else self._whole_picks(experts, num_tokens),
            own_experts=None if own is None else self._whole_picks(own, num_tokens),
        )

    def own_picks(self, picks: ExpertPicks) -> ExpertPicks:
        """Return the experts of this rank's slice; a token that fills the row up gets the first ones."""
        num_layers, num_tokens, top_k = picks.indices_LTK.shape
        missing = -num_tokens % self.size
        filling = torch.arange(top_k, dtype=picks.indices_LTK.dtype, device=picks.indices_LTK.device)
        rows = torch.cat([picks.indices_LTK, filling.expand(num_layers, missing, top_k)], dim=1)
        length = rows.shape[1] // self.size
        return ExpertPicks(rows.narrow(1, self.index * length, length), picks.num_experts)

    def to_heads(self, states: Tensor) -> Tensor:
        """Exchange all heads of this rank's tokens, [1, H, t, D], for its heads of all tokens, [1, H / n, n t, D].
        Collective.

        Where there are more ranks than heads, neighbouring ranks get the same one.
        """
        if self.size > states.shape[1]:
            states = states.repeat_interleave(self.size // states.shape[1], dim=1)
        _, heads, length, width = states.shape
        received = _AllToAll.apply(states.reshape(self.size, heads // self.size, length, width), self.group)
        assert isinstance(received, Tensor)
        return received.transpose(0, 1).reshape(1, heads // self.size, self.size * length, width)

    def to_tokens(self, states: Tensor) -> Tensor:
        """This rank's heads of all tokens, [1, n t, h, D], become all heads of its tokens, [1, t, n h, D]. Collective."""
        _, num_tokens, heads, width = states.shape
        length = num_tokens // self.size
        received = _AllToAll.apply(states.reshape(self.size, length, heads, width), self.group)
        assert isinstance(received, Tensor)
        return received.transpose(0, 1).reshape(1, length, self.size * heads, width)

    def own_heads(self, values: Tensor) -> Tensor:
        """This rank's part of one value a head, [H] -> [H / n]."""
        length = values.shape[0] // self.size
        return values.narrow(0, self.index * length, length)

    def own_row(self, row: Tensor, filling: float = 0) -> Tensor:
        """Return this rank's slice of a row, [..., T], which is filled up."""
        return self._slice(pad(row, (0, -row.shape[-1] % self.size), value=filling))

    def _slice(self, row: Tensor) -> Tensor:
        length = row.shape[-1] // self.size
        return row.narrow(-1, self.index * length, length)

    def _joined(self, own_t: Tensor) -> Tensor:
        parts = [torch.empty_like(own_t) for _ in range(self.size)]
        torch.distributed.all_gather(parts, own_t.detach().contiguous(), group=self.group)
        parts[self.index] = own_t
        return torch.cat(parts)

    def _whole_picks(self, picks: ExpertPicks, num_tokens: int) -> ExpertPicks:
        own = picks.indices_LTK.contiguous()
        # As bytes: NCCL does not know integers of two bytes.
        parts = [torch.empty_like(own) for _ in range(self.size)]
        torch.distributed.all_gather([part.view(torch.uint8) for part in parts], own.view(torch.uint8), group=self.group)
        return ExpertPicks(torch.cat(parts, dim=1)[:, :num_tokens], picks.num_experts)


class _AllToAll(torch.autograd.Function):
    """Part r of the first dimension goes to rank r; the gradient goes back the same way."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _exchanged(parts, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _exchanged(gradients[0], ctx.group), None


def _exchanged(parts: Tensor, group: Any) -> Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    torch.distributed.all_to_all_single(received, parts, group=group)
    return received
