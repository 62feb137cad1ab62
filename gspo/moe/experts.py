"""The experts that a mixture-of-experts model chose, and two diagnostics of the choice.

Both look at the same tokens: the positions of ``mask_T``, whose hidden states predict an action token. A pick is one of
the k experts that one layer's router chose for one such position.

- Load balance, over all training forward passes of a batch: ``expert_load_max_over_mean/all`` is the largest expert's
  number of picks over the mean of all experts (1 = perfectly balanced), ``expert_load_unused/all`` the fraction of experts
  without a pick; both are means over layers. With few tokens, chance alone puts the first above 1.
- ``experts_changed``: of the picks of training forward passes, the fraction whose expert is not among the picks of the
  same position and layer in the reference pass, which ran under the weights of the batch's start. For tokens of lag 0
  those are the behaviour policy's weights; for older tokens the drift before the batch is not counted.

Where an engine's choices are replayed (R3), they are compared with those that the learner's routers would have made under
the weights of the batch's start, given the engine's choices in the layers before:

- ``experts_differ``: the fraction of (token, layer) pairs whose sets of experts differ: by rounding, and at a lag by drift.
- ``experts_replayed``: the fraction of action tokens whose engine's choices are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gspo.diagnostics import LAG_BUCKETS
from gspo.moe.mixture import mixture_of

_INDEX_TYPES = (torch.int64, torch.int32)


@dataclass(frozen=True)
class ExpertPicks:
    """The routers' choices in one forward pass."""

    indices_LTK: Tensor
    """int8 or int16 [layers, T, k]; unordered within a token."""
    num_experts: int


@dataclass(frozen=True)
class ExpertShape:
    """The choices of a model: its routers, the experts per token, and the experts of a layer."""

    num_layers: int
    top_k: int
    num_experts: int

    @classmethod
    def of(cls, model: Any) -> ExpertShape:
        """Return that of a Hugging Face model."""
        mixture = mixture_of(model.config.to_dict())
        return cls(len(find_routers(model)), mixture.chosen, mixture.experts)

    def require(self, experts_TLK: Tensor) -> None:
        """Raises: ValueError when an engine's choices, [T, layers, k], are not those of such a model. Reads their values."""
        found = tuple(experts_TLK.shape[1:])
        if found != (self.num_layers, self.top_k):
            raise ValueError(
                f"an engine reported {found[1]} experts a token in {found[0]} layers, and the learner's model has "
                f"{self.top_k} in {self.num_layers} layers with routers: serve the learner's model, or set "
                'objective.routing_replay_from = "learner"'
            )
        highest = int(experts_TLK.max()) if experts_TLK.numel() else 0
        if highest >= self.num_experts:
            raise ValueError(
                f"an engine reported expert {highest}, and the learner's model has 0 to {self.num_experts - 1}: serve the "
                'learner\'s model, or set objective.routing_replay_from = "learner"'
            )


class ExpertRecorder:
    """Records the picks of a Hugging Face model's routers, one forward pass at a time.

    A router (see ``find_routers``) returns either the indices [T, k] next to its logits, or only logits, of which the
    ``num_experts_per_tok`` largest count. Nothing is recorded where no module returns either, or layers differ in k or in
    the number of experts.
    """

    def __init__(self, model: Any) -> None:
        """Take a Hugging Face model; it has hooks only while recording."""
        self._top_k: int | None = mixture_of(model.config.to_dict()).chosen or None
        self._routers = find_routers(model)
        self._layers: list[ExpertPicks] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record one forward pass inside; leave the context before backward, which may compute layers again."""
        self._layers = []
        with forward_hooks(self._routers.values(), self._record):
            yield

    def take(self) -> ExpertPicks | None:
        """Return the picks of the last recorded pass, once; None for a dense model. Does not wait for the device."""
        layers, self._layers = self._layers, []
        if len({(layer.indices_LTK.shape, layer.num_experts) for layer in layers}) != 1:
            return None
        return ExpertPicks(torch.cat([layer.indices_LTK for layer in layers]), layers[0].num_experts)

    def _record(self, router: nn.Module, inputs: Any, output: Any) -> None:
        parts = output if isinstance(output, tuple) else (output,)
        tensors = [part.detach() for part in parts if isinstance(part, Tensor) and part.dim() > 0]
        # The widest tensor is the logits, or the histogram that DeepSpeed's router returns instead.
        num_experts = max((tensor.shape[-1] for tensor in tensors), default=0)
        logits = [x for x in tensors if x.is_floating_point() and x.shape[-1] == num_experts]
        chosen = [x for x in tensors if x.dtype in _INDEX_TYPES and x.dim() > 1 and x.shape[-1] < num_experts]
        if chosen:
            indices = chosen[0]
        elif logits and self._top_k is not None and self._top_k <= num_experts:
            indices = logits[-1].topk(self._top_k, dim=-1, sorted=False).indices
        else:
            return
        dtype = torch.int8 if num_experts <= 128 else torch.int16
        self._layers.append(ExpertPicks(indices.reshape(1, -1, indices.shape[-1]).to(dtype), num_experts))


@contextmanager
def forward_hooks(modules: Iterable[nn.Module], hook: Callable[[nn.Module, Any, Any], Any]) -> Iterator[None]:
    """Have ``hook`` called after each module's forward pass inside, and no longer."""
    handles = [module.register_forward_hook(hook) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def find_routers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the model's routers by name, in order: modules called "gate" or "router", or of a class "...Router...".

    A router inside another router is left out.
    """
    routers: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        # The routers of DeepSpeed and of some models contain a "gate", which makes the same choice a second time.
        if _is_router(name, module) and not any(name.startswith(f"{outer}.") for outer in routers):
            routers[name] = module
    return routers


def _is_router(name: str, module: nn.Module) -> bool:
    own_name = name.rpartition(".")[2]
    return own_name in ("gate", "router") or "Router" in type(module).__name__


class ExpertTally:
    """The sums of one batch on one rank; ``metrics`` adds them up over ranks. Holds layers x experts numbers."""

    def __init__(self, *, compares: bool = False) -> None:
        """``compares``: ``compare`` is used, on some rank."""
        self._compares = compares
        self._reported_B4 = torch.zeros(len(LAG_BUCKETS), 4, dtype=torch.float64)
        """By lag bucket: (token, layer) pairs that differ from an engine's, and such pairs; its tokens, and all."""
        self._load_LE: Tensor | None = None
        """int64; picks of each expert in training passes."""
        self._changed_B2 = torch.zeros(len(LAG_BUCKETS), 2, dtype=torch.float64)
        """By lag bucket: picks that changed, and picks that had a reference."""

    def add(
        self,
        picks: ExpertPicks,
        mask_T: Tensor,
        sequence_ids_T: Tensor,
        lag_S: Tensor,
        *,
        reference: ExpertPicks | None,
    ) -> None:
        """Count one training forward pass of a micro-batch.

        Args:
            picks: those of the pass.
            mask_T: bool; the positions that count.
            sequence_ids_T: int64; 0 .. S - 1 where the mask is set.
            lag_S: mean lag of each sequence.
            reference: the picks of the same micro-batch at the batch's start; None where there was no such pass, or
                where it ran under these same weights.
        """
        num_layers, _, top_k = picks.indices_LTK.shape
        load_LE = load_of(picks, mask_T)
        self._load_LE = load_LE if self._load_LE is None else self._load_LE + load_LE
        if reference is None:
            return
        buckets_T = _buckets(lag_S, mask_T, sequence_ids_T)
        counted_T = mask_T.double()
        sums_T2 = torch.stack([num_changed(picks, reference) * counted_T, num_layers * top_k * counted_T], dim=1)
        self._changed_B2 = self._changed_B2.to(mask_T.device, non_blocking=True).index_add(0, buckets_T, sums_T2)

    def compare(
        self, own: ExpertPicks | None, reported_TLK: Tensor | None, mask_T: Tensor, sequence_ids_T: Tensor, lag_S: Tensor
    ) -> None:
        """Count one pass of a micro-batch beside the engine's choices, int [T, layers, k] with -1 where none are known.

        Args:
            own: what the learner's routers would have chosen; None, like ``reported_TLK``, where nothing was reported.
            mask_T, sequence_ids_T, lag_S: as in ``add``.
        """
        num_layers = 1
        known_T = differing_T = torch.zeros_like(mask_T, dtype=torch.float64)
        if own is not None and reported_TLK is not None:
            num_layers = own.indices_LTK.shape[0]
            known_T = (mask_T & (reported_TLK >= 0).all(dim=2).all(dim=1)).double()
            differing_T = num_differing(own, ExpertPicks(reported_TLK.transpose(0, 1), own.num_experts)) * known_T
        sums_T4 = torch.stack([differing_T, num_layers * known_T, known_T, mask_T.double()], dim=1)
        buckets_T = _buckets(lag_S, mask_T, sequence_ids_T)
        self._reported_B4 = self._reported_B4.to(mask_T.device, non_blocking=True).index_add(0, buckets_T, sums_T4)

    def metrics(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Return the diagnostics by "name/bucket", the same on every rank; none for a dense model. Collective.

        Args:
            sum_over_ranks: the element-wise sum of every rank's tensor.
        """
        own_shape = (0, 0, 0) if self._load_LE is None else (1, *self._load_LE.shape)
        shapes = sum_over_ranks(torch.tensor(own_shape, dtype=torch.int64))
        load_LE = self._load_LE
        if load_LE is None:
            # A rank whose micro-batches were all empty does not know the model's shape. The others need not wait for it.
            num_counting, *totals = shapes.tolist()
            if num_counting == 0:
                return {}
            load_LE = torch.zeros(*(total // num_counting for total in totals))
        num_layers = load_LE.shape[0]
        changed_B2 = self._changed_B2.to(load_LE.device, non_blocking=True)
        sums = sum_over_ranks(torch.cat([changed_B2.reshape(-1), load_LE.double().reshape(-1)])).cpu()
        changed_B2, load_LE = sums[: changed_B2.numel()].reshape(-1, 2), sums[changed_B2.numel() :].reshape(num_layers, -1)
        if not bool(load_LE.any()):
            return {}
        metrics = {
            "expert_load_max_over_mean/all": float((load_LE.amax(dim=1) / load_LE.mean(dim=1)).mean()),
            "expert_load_unused/all": float((load_LE == 0).double().mean()),
        }
        metrics |= self._reported(sum_over_ranks)
        names = ["all", *(name for name, _ in LAG_BUCKETS)]
        for name, (changed, total) in zip(names, [changed_B2.sum(dim=0), *changed_B2], strict=True):
            if total > 0:
                metrics[f"experts_changed/{name}"] = float(changed / total)
        return metrics

    def _reported(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> dict[str, float]:
        if not self._compares:
            return {}
        reported_B4 = sum_over_ranks(self._reported_B4).cpu()
        differing, pairs, known, tokens = reported_B4.sum(dim=0).tolist()
        metrics = {"experts_replayed/all": known / max(tokens, 1.0)}
        if pairs:
            metrics["experts_differ/all"] = differing / pairs
        for (name, _), (differing, pairs, *_rest) in zip(LAG_BUCKETS, reported_B4.tolist(), strict=True):
            if pairs:
                metrics[f"experts_differ/{name}"] = differing / pairs
        return metrics


def load_of(picks: ExpertPicks, mask_T: Tensor) -> Tensor:
    """Return int64 [L, E]: the picks of each layer's experts at the positions of ``mask_T``, bool [T]."""
    num_layers, _, top_k = picks.indices_LTK.shape
    load_LE = torch.zeros(num_layers, picks.num_experts, dtype=torch.int64, device=mask_T.device)
    ones_TK = mask_T.long()[:, None].expand(-1, top_k).reshape(-1)
    # One layer at a time: the indices for scatter_add_ are eight times the size of the recorded ones.
    for load_E, indices_TK in zip(load_LE, picks.indices_LTK, strict=True):
        load_E.scatter_add_(0, indices_TK.reshape(-1).long(), ones_TK)
    return load_LE


def _buckets(lag_S: Tensor, mask_T: Tensor, sequence_ids_T: Tensor) -> Tensor:
    """Return the lag bucket of each token's sequence."""
    bounds = torch.tensor([high for _, high in LAG_BUCKETS]).to(lag_S.device, non_blocking=True)
    return torch.bucketize(lag_S, bounds)[torch.where(mask_T, sequence_ids_T, 0)]


def num_differing(picks: ExpertPicks, reference: ExpertPicks) -> Tensor:
    """Return int64 [T]: in how many layers a token's experts are not those of the reference, in any order."""
    return _not_kept(picks, reference).any(dim=2).sum(dim=0)


def num_changed(picks: ExpertPicks, reference: ExpertPicks) -> Tensor:
    """Return int64 [T]: how many of a token's picks, over all layers, are not among its reference picks of that layer."""
    return _not_kept(picks, reference).sum(dim=(0, 2))


def _not_kept(picks: ExpertPicks, reference: ExpertPicks) -> Tensor:
    kept_LTK = torch.zeros_like(picks.indices_LTK, dtype=torch.bool)
    for index in range(reference.indices_LTK.shape[-1]):
        kept_LTK |= picks.indices_LTK == reference.indices_LTK[..., index : index + 1]
    return ~kept_LTK


def changed_share(picks: ExpertPicks, reference: ExpertPicks, mask_T: Tensor | None = None) -> float:
    """Return the share, in [0, 1], of a pass's picks that are not among those of ``reference``.

    It measures how volatile routing is between two weights, or two engines, on the same tokens.

    Args:
        mask_T: bool; the tokens that count, at least one. None: all of them.

    Raises: ValueError for passes of different shapes, and when no token counts.
    """
    if picks.indices_LTK.shape != reference.indices_LTK.shape or picks.num_experts != reference.num_experts:
        raise ValueError(
            f"picks are {list(picks.indices_LTK.shape)} of {picks.num_experts} experts, the reference is "
            f"{list(reference.indices_LTK.shape)} of {reference.num_experts}: compare passes over the same tokens"
        )
    num_layers, num_tokens, top_k = picks.indices_LTK.shape
    changed_T = num_changed(picks, reference)
    counted = num_tokens if mask_T is None else int(mask_T.sum())
    if counted == 0:
        raise ValueError(f"mask_T selects none of {num_tokens} tokens; set it for at least one")
    changed = changed_T.sum() if mask_T is None else changed_T[mask_T].sum()
    return int(changed) / (num_layers * top_k * counted)
