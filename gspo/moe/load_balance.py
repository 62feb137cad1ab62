"""The auxiliary loss that keeps experts in use (Switch Transformer, arXiv 2101.03961, eq. 4 to 6).

For E experts of which a token uses k, over the T tokens of all L layers' routers,

    loss = E * sum_e f_e P_e,   f_e = picks of e / (L T),   P_e = mean of softmax(z)_e

It is k where all experts are used alike, and larger otherwise. The gradient goes through P: f is a count. This is the form
of transformers' ``load_balancing_loss_func``, where picks are the k largest logits and the layers are one table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gspo.moe.experts import find_routers, forward_hooks
from gspo.moe.mixture import mixture_of


def load_balancing_loss(router_logits: Sequence[Tensor], top_k: int) -> Tensor:
    """Return the loss as a scalar, float32.

    router_logits: [T, E] of each layer, with gradient. Raises: ValueError for no layer, or another shape.
    """
    if not router_logits or any(logits.dim() != 2 or logits.shape != router_logits[0].shape for logits in router_logits):
        raise ValueError(f"router_logits have shapes {[tuple(x.shape) for x in router_logits]}; give [T, E] of each layer")
    num_tokens, num_experts = router_logits[0].shape
    picks_E = router_logits[0].new_zeros(num_experts, dtype=torch.float32)
    sums_E = torch.zeros_like(picks_E)
    # A layer at a time: all layers' probabilities at once would be the largest tensor of the pass.
    for logits_TE in router_logits:
        chosen = logits_TE.detach().topk(top_k, dim=-1).indices.reshape(-1)
        picks_E = picks_E.index_add(0, chosen, torch.ones_like(chosen, dtype=torch.float32))
        sums_E = sums_E + logits_TE.float().softmax(dim=-1).sum(dim=0)
    rows = max(1, num_tokens * len(router_logits))
    return num_experts * (picks_E / rows * (sums_E / rows)).sum()


class RouterLogits:
    """Takes the router logits out of a model's forward pass, with their gradient."""

    def __init__(self, model: Any) -> None:
        """Take a Hugging Face model; it has hooks only while recording. Raises: ValueError for a dense model."""
        mixture = mixture_of(model.config.to_dict())
        self.top_k, self._num_experts = mixture.chosen, mixture.experts
        self._routers = find_routers(model)
        if not self._routers or not mixture:
            raise ValueError(f"{type(model).__name__} has no routers: a load-balancing loss needs a mixture of experts")
        self._logits: list[Tensor] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record one forward pass inside; leave the context before backward, which may compute layers again."""
        self._logits = []
        with forward_hooks([_giving_logits(router) for router in self._routers.values()], self._record):
            yield

    def take(self) -> list[Tensor]:
        """Return the logits of the last recorded pass, [T, E] of each layer, once.

        Raises: ValueError where a router returned none.
        """
        logits, self._logits = self._logits, []
        if len(logits) != len(self._routers):
            raise ValueError(
                f"{len(logits)} of {len(self._routers)} routers returned logits, which the load-balancing loss needs; set "
                "objective.load_balance_coefficient = 0"
            )
        return logits

    def _record(self, router: nn.Module, inputs: Any, output: Any) -> None:
        parts = output if isinstance(output, tuple) else (output,)
        for part in parts:
            if isinstance(part, Tensor) and part.is_floating_point() and part.shape[-1] == self._num_experts:
                self._logits.append(part.reshape(-1, self._num_experts))
                return


def _giving_logits(router: nn.Module) -> nn.Module:
    """DeepSpeed's routers return none, but have a linear layer that does."""
    gate = getattr(router, "gate", None)
    return gate if isinstance(gate, nn.Linear) else router
