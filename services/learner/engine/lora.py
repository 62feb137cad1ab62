"""Adapters in the engine: what is trained of a model, and what a checkpoint of it refers to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from gspo.model.lora import LoraPlan, is_lora
from gspo_services.shared.settings import LoraSection


def lora_plan(section: LoraSection) -> LoraPlan | None:
    """The adapters that the settings ask for; None: all weights are trained."""
    if not section.is_used:
        return None
    targets = tuple(section.target_modules)
    return LoraPlan(rank=section.rank, alpha=section.alpha, target_modules=targets, num_adapters=section.num_adapters)


def trained_parameters(model: nn.Module, plan: LoraPlan | None) -> list[tuple[str, nn.Parameter]]:
    """The parameters that training changes, frozen by mistake or not: all, or those of the adapters."""
    return [(name, parameter) for name, parameter in model.named_parameters() if plan is None or is_lora(name)]


def lora_layout(plan: LoraPlan | None, names: Sequence[str], base_path: Path | None, base_digest: str) -> Mapping[str, Any]:
    """What a checkpoint of adapters adds to its layout, as plain JSON values; nothing without adapters. ``names``: those of
    several, in the order of their rows."""
    if plan is None:
        return {}
    lora = {"rank": plan.rank, "alpha": plan.alpha, "target_modules": sorted(plan.target_modules)}
    lora |= {"adapters": list(names)} if names else {}
    return {"lora": lora, "base": base_digest, "base_path": "" if base_path is None else str(base_path)}
