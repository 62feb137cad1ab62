"""Low-rank adapters (LoRA) of a Hugging Face model, with peft: which weights have one, and what they are with it.

    adapted weight = W + alpha / rank * B A        A random, B zero at first

A weight of experts [E, out, in] has an A and a B for each. peft wraps the modules, so that ``q_proj.weight`` becomes
``q_proj.base_layer.weight`` beside ``q_proj.lora_A.default.weight``; *plain* names are those without peft.

The product is computed in float64 and rounded once: the order of its sums, which depends on device and threads, is lost in
the rounding. So a version can be compared bit by bit with what an export computes later.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

_LATENT: Final = ("self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj", "self_attn.o_proj")
MODULES: Final[Mapping[str, tuple[tuple[str, ...], ...]]] = {
    "attention": (
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
        ("self_attn.q_a_proj", "self_attn.q_b_proj", *_LATENT),
        ("self_attn.q_proj", *_LATENT),
    ),
    "mlp": (("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),),
}
"""Linear layers of a decoder's layer by target, as families have them: latent attention has others. A model must have all of
one form: peft would adapt those that it has."""
PARAMETERS: Final[Mapping[str, tuple[tuple[str, ...], ...]]] = {
    "experts": (
        ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
        ("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"),
    )
}
"""Stacked parameters by target, likewise."""
TARGETS: Final = (*MODULES, *PARAMETERS)
_NAME: Final = "default"
_WRAPPED: Final = ".base_layer"
_OWN: Final = (".lora_A.", ".lora_B.")


@dataclass(frozen=True, kw_only=True)
class LoraPlan:
    """Which adapters a model gets."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    """Of TARGETS."""
    num_adapters: int = 1
    """Above 1, A and B of each weight hold those of all adapters side by side: ``rank`` rows of A and columns of B for each.
    ``gspo.model.adapter_choice`` then has each token use its own adapter's."""


@dataclass(frozen=True, kw_only=True)
class AdaptedWeight:
    """The adapter of one weight."""

    name: str
    """Of the adapter's matrices, up to ``lora_A`` and ``lora_B``: as peft's files have it, without its prefix."""
    lora_a: nn.Parameter
    lora_b: nn.Parameter
    scale: float
    num_experts: int
    """0: a matrix. Otherwise the weight is a stack of so many, and lora_a and lora_b hold theirs side by side."""
    transposed: bool
    """Whether the stack is [E, in, out]."""


def inject_lora(model: nn.Module, plan: LoraPlan, *, seed: int) -> None:
    """Give ``model`` adapters that change nothing yet, and freeze everything else. The same on every rank.

    Raises: ValueError when a target matches nothing, or peft is not installed.
    """
    try:
        from peft import inject_adapter_in_model
    except ModuleNotFoundError as error:
        raise ValueError(f"adapters need peft ({error}); install peft==0.21.2, or set lora.rank = 0") from error

    for target in plan.target_modules:
        if not _has(model, target):
            found = [each for each in TARGETS if _has(model, each)]
            raise ValueError(
                f"lora.target_modules names {target!r}, and {type(model).__name__} has no such weights; name those that it "
                f"has: {', '.join(found) or 'none that can be adapted'}"
            )
    # New matrices are drawn on the CPU. Elsewhere random numbers are drawn as without adapters.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        inject_adapter_in_model(lora_config(plan), model)
    freeze_all_but_lora(model)


def lora_config(plan: LoraPlan) -> Any:
    """peft's own configuration, which its files hold, too. Raises: ValueError for several adapters of experts."""
    from peft import LoraConfig

    if plan.num_adapters > 1 and any(target in PARAMETERS for target in plan.target_modules):
        raise ValueError(f"{plan.num_adapters} adapters of experts cannot be told apart by token; adapt other weights")
    modules = [re.escape(name) for name in _names(plan.target_modules, MODULES)]
    parameters = _names(plan.target_modules, PARAMETERS)
    return LoraConfig(
        # The scale, alpha / rank, stays that of one adapter.
        r=plan.rank * plan.num_adapters,
        lora_alpha=plan.alpha * plan.num_adapters,
        # A regular expression: a list of modules beside one of parameters is ignored in part.
        target_modules=rf".*\.(?:{'|'.join(modules)})" if modules else [],
        target_parameters=parameters or None,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )


def _names(targets: Iterable[str], known: Mapping[str, tuple[tuple[str, ...], ...]]) -> list[str]:
    """Of all forms of these targets, each once."""
    return list(dict.fromkeys(name for target in targets for form in known.get(target, ()) for name in form))


def freeze_all_but_lora(model: nn.Module) -> None:
    """Let only the adapters be trained; parameters that somebody made since would be trained as well."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_lora(name))


def is_lora(name: str) -> bool:
    """Tell whether a parameter of this name belongs to an adapter."""
    return any(part in name for part in _OWN)


def plain_name(name: str) -> str:
    """The name that a parameter has without adapters."""
    return name.replace(_WRAPPED, "")


def lora_name(name: str) -> str:
    """The name of an adapter's matrix without that of the adapter."""
    return name.replace(f".{_NAME}", "")


def adapted_weights(model: nn.Module) -> dict[str, AdaptedWeight]:
    """The adapters of ``model`` by the plain name of their weight; empty when it has none."""
    found = {}
    for path, module in model.named_modules():
        if "lora_A" not in module._modules:
            continue
        wrapper: Any = module
        # peft wraps a stacked parameter by another class than a linear layer.
        parameter = getattr(wrapper, "parameter_name", None)
        found[f"{plain_name(path)}.{parameter or 'weight'}"] = AdaptedWeight(
            name=path,
            lora_a=wrapper.lora_A[_NAME].weight,
            lora_b=wrapper.lora_B[_NAME].weight,
            scale=float(wrapper.scaling[_NAME]),
            num_experts=0 if parameter is None else int(wrapper.num_experts),
            transposed=parameter is not None and not wrapper._did_swap_in_out_features,
        )
    return found


def set_scale(model: nn.Module, scale: float) -> None:
    """Multiply B A by ``scale`` from now on: alpha / rank of an adapter whose rank is below that of the matrices, with zeros
    in the rows and columns that it lacks. Those stay exactly 0 in training: their gradients are."""
    for module in model.modules():
        if "lora_A" in module._modules:
            wrapper: Any = module
            wrapper.scaling[_NAME] = scale


def adapter_inputs(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that multiply by A, in a model whose adapted weights are matrices."""
    for module in model.modules():
        if "lora_A" in module._modules:
            wrapper: Any = module
            yield wrapper.lora_A[_NAME]


def part_of(matrix: Tensor, name: str, place: int, rank: int) -> Tensor:
    """Return one adapter's own part of A or B of several: rows of A, columns of B. ``name``: the matrix's, by which the two
    are told apart; ``place``: the adapter's."""
    return matrix.narrow(0 if ".lora_A." in name else 1, place * rank, rank)


def merged(weight: Tensor, adapted: AdaptedWeight, lora_a: Tensor, lora_b: Tensor) -> Tensor:
    """float32: the adapted weight, for the whole values of ``weight``, A and B. Holds one expert in float64 at a time."""
    if not adapted.num_experts:
        return add_change(weight, change(adapted, lora_a, lora_b))
    result = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
    for expert, its_change in enumerate(_changes(adapted, lora_a, lora_b)):
        result[expert] = add_change(weight[expert], its_change)
    return result


def change(adapted: AdaptedWeight, lora_a: Tensor, lora_b: Tensor) -> Tensor:
    """float64, in the weight's shape: what the adapter adds to it."""
    if adapted.num_experts:
        return torch.stack(list(_changes(adapted, lora_a, lora_b)))
    return lora_b.double() @ lora_a.double() * adapted.scale


def add_change(weight: Tensor, change: Tensor) -> Tensor:
    """float32: ``weight`` and a float64 change of it, rounded once."""
    return (weight.double() + change).float()


def _changes(adapted: AdaptedWeight, lora_a: Tensor, lora_b: Tensor) -> Iterator[Tensor]:
    """float64, for each expert. peft lays A out by expert and rank, B by rank and expert."""
    a_ERI = lora_a.double().reshape(adapted.num_experts, -1, lora_a.shape[-1])
    b_ORE = lora_b.double().reshape(lora_b.shape[0], -1, adapted.num_experts)
    for expert in range(adapted.num_experts):
        product_OI = b_ORE[:, :, expert] @ a_ERI[expert] * adapted.scale
        yield product_OI.T if adapted.transposed else product_OI


def _has(model: nn.Module, target: str) -> bool:
    """Return whether the model has all kinds of weights that belong to one form of a target.

    Not those of dense layers beside experts: peft would take their names for those of the experts.
    """
    if target == "mlp" and _has(model, "experts"):
        return False
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    stacked = [name for name, _ in model.named_parameters()]
    return any(
        all(any(name.endswith(f".{wanted}") for name in names) for wanted in form)
        for names, known in ((linear, MODULES), (stacked, PARAMETERS))
        for form in known.get(target, ())
    )
