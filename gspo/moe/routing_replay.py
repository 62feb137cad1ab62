"""Routing Replay: a forward pass with the experts of an earlier pass, and gates from the present weights.

In the GSPO paper (arXiv 2507.18071, section 5.3) token-level ratios of a mixture of experts need it to train stably: an
update changes some ten percent of a token's experts, so that the ratio compares two networks. With replay, position t of
layer l uses the experts e_1 .. e_k recorded there, weighted as if the router had chosen them now. For Qwen3-MoE, with
router logits z_t of the present weights,

    g_j = p_{e_j} / sum_i p_{e_i},   p = softmax(z_t)        (without the division where norm_topk_prob is False)

With choices that an inference engine reported (Rollout Routing Replay, arXiv 2510.11370) only some positions have them; the
others choose by z.

The router keeps its gradient through z, and any router keeps its formula: only the result of its ``torch.topk`` is
replaced, and the router's own code follows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gspo.inputs.validation import values_are_trusted
from gspo.moe.experts import ExpertPicks, find_routers


class RoutingReplay:
    """Makes a model's routers repeat a recorded choice.

    It works for Hugging Face models and DeepSpeed's expert parallelism where routers choose by one topk over all experts:
    Qwen2 and Qwen3-MoE, Mixtral, OLMoE, GPT-OSS, and those that choose groups of experts first, such as DeepSeek-V3 and
    GLM-4.5. Routers that leave the choice to the module around them are refused at the first pass.
    """

    def __init__(self, model: nn.Module) -> None:
        """Take a model as ``ExpertRecorder`` does; it is changed only while replaying.

        Raises: ValueError for a dense model.
        """
        self._routers = find_routers(model)
        if not self._routers:
            raise ValueError(f"{type(model).__name__} has no routers: routing replay needs a mixture of experts")
        self._own: dict[str, ExpertPicks] = {}

    def take_own(self) -> ExpertPicks | None:
        """Return what the routers would have chosen in the last pass of the partial replay that this is inside, once."""
        own = list(self._own.values())
        self._own.clear()
        return ExpertPicks(torch.cat([each.indices_LTK for each in own]), own[0].num_experts) if own else None

    @contextmanager
    def replaying(self, picks: ExpertPicks, *, partial: bool = False) -> Iterator[None]:
        """Replay ``picks`` in every forward pass inside; the passes must have the tokens of the recorded pass.

        Put backward inside as well where it computes layers again (activation checkpointing): outside, the second
        computation would choose other experts than the first. A recorder that is active meanwhile sees the picks.
        ``partial``: where a token of a layer has a negative index, its router chooses; ``take_own`` has all its choices.

        Raises: ValueError for picks with another number of layers or, outside ``gspo.inputs.validation.trusted_values``,
        with an index that is not an expert. The forward pass raises it for another number of tokens, experts, or experts per
        token, and for a router that cannot be replayed.
        """
        num_layers = picks.indices_LTK.shape[0]
        if num_layers != len(self._routers):
            raise ValueError(f"picks cover {num_layers} layers, the model has {len(self._routers)} routers")
        _require_experts(picks, -1 if partial else 0)
        forwards = [router.__dict__.get("forward") for router in self._routers.values()]
        for (name, router), indices_TK in zip(self._routers.items(), picks.indices_LTK, strict=True):
            # No hook: a hook that fails between two others would leave its change behind.
            own = self._own if partial else None
            router.__dict__["forward"] = _replayed(name, router, indices_TK, picks.num_experts, own)
        try:
            yield
        finally:
            # Backward may have computed layers again after their choices were taken.
            self._own.clear()
            for router, forward in zip(self._routers.values(), forwards, strict=True):
                if forward is None:
                    del router.__dict__["forward"]
                else:
                    router.__dict__["forward"] = forward


def _replayed(
    name: str, router: nn.Module, indices_TK: Tensor, num_experts: int, own: dict[str, ExpertPicks] | None
) -> Callable[..., Any]:
    """``own``: gets the router's choice, where the replay is partial; None: it is not."""
    forward = router.forward

    def replayed(*args: Any, **kwargs: Any) -> Any:
        with _RecordedChoice(indices_TK, num_experts, partial=own is not None) as choice:
            output = forward(*args, **kwargs)
        # Groups are chosen before the experts in them, and by scores with one dimension more.
        chosen = choice.found[-1] if choice.found else None
        times = sum(each == chosen for each in choice.found)
        if chosen is None or times != 1:
            raise ValueError(
                f"{name} ({type(router).__name__}) chooses by topk {times} times; only a router that chooses by one call "
                "can be replayed: turn off routing replay"
            )
        for what, value in chosen.sizes.items():
            if value != choice.expected[what]:
                raise ValueError(
                    f"{name} has {value} {what} in this pass, the picks have {choice.expected[what]}; give those recorded "
                    "of the same tokens and model"
                )
        if own is not None and choice.own_TK is not None:
            own[name] = ExpertPicks(choice.own_TK[None].to(indices_TK.dtype), num_experts)
        return output

    return replayed


class _Topk(NamedTuple):
    """One call: the sizes that it requested, and the dimensions of its scores."""

    sizes: dict[str, int]
    num_dimensions: int


class _RecordedChoice(TorchFunctionMode):
    """Answers topk with the recorded indices, in their order, and the values there; values keep their gradient."""

    def __init__(self, indices_TK: Tensor, num_experts: int, *, partial: bool) -> None:
        super().__init__()
        self._indices_TK = indices_TK
        self._partial = partial
        self.own_TK: Tensor | None = None
        """What the router would have chosen, where the replay is partial."""
        self.expected = {"tokens": indices_TK.shape[0], "experts per token": indices_TK.shape[1], "experts": num_experts}
        self.found: list[_Topk] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.topk or func is Tensor.topk:
            return self._topk(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _topk(self, scores_TE: Tensor, k: int, *args: Any, **kwargs: Any) -> Any:
        *outer, num_experts = scores_TE.shape
        sizes = {"tokens": math.prod(outer), "experts per token": k, "experts": num_experts}
        self.found.append(_Topk(sizes, scores_TE.dim()))
        if sizes != self.expected:
            # A choice of groups, or the pass is refused once all calls are known.
            return torch.topk(scores_TE, k, *args, **kwargs)
        indices = self._indices_TK.to(device=scores_TE.device, dtype=torch.int64).reshape(*outer, k)
        if self._partial:
            own = torch.topk(scores_TE.detach(), k, *args, **kwargs).indices
            self.own_TK = own.reshape(-1, k)
            indices = torch.where((indices < 0).any(-1, keepdim=True), own, indices)
        return torch.return_types.topk((scores_TE.gather(-1, indices), indices))


def _require_experts(picks: ExpertPicks, least: int) -> None:
    if picks.indices_LTK.numel() == 0 or values_are_trusted():
        return
    lowest, highest = (int(bound) for bound in torch.aminmax(picks.indices_LTK))
    if lowest < least or highest >= picks.num_experts:
        raise ValueError(
            f"picks hold experts {lowest} to {highest}, the model has 0 to {picks.num_experts - 1}; every token of every "
            "layer needs its own"
        )
