"""What a checkpoint and the learner that loads it must share, as plain JSON values: ``LearnerEngine.layout``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_OF_LORA: Final = ("lora", "base", "base_path")
"""Only a checkpoint of adapters (``gspo.model.lora``) has them: which adapters, and the model that they belong to."""


def layout_problem(saved: Mapping[str, Any], present: Mapping[str, Any]) -> str:
    """Say why an engine with layout ``present`` cannot load a checkpoint, with both values and what to do; empty if it can.

    The text continues after the checkpoint's name.
    """
    problem = _lora_problem(saved, present)
    if problem:
        return problem
    for key, value in present.items():
        if key not in _OF_LORA and saved.get(key) != value:
            return f"was saved with {key} = {saved.get(key)}, this learner has {value}; use the same"
    return ""


def _lora_problem(saved: Mapping[str, Any], present: Mapping[str, Any]) -> str:
    before, now = saved.get("lora"), present.get("lora")
    if before is None and now is None:
        return ""
    if now is None:
        return (
            f"holds adapters ({_text(before)}), and lora.rank is 0; continue the run with the [lora] that it began with, or "
            "start another one from its export"
        )
    if before is None:
        return (
            f"holds all weights, and lora.rank is {now['rank']}; continue the run with lora.rank = 0, or start another one "
            "with adapters from its export"
        )
    if saved.get("base") != present.get("base"):
        return (
            f"holds adapters of the model that was at {saved.get('base_path')}, with digest {saved.get('base')}; the model "
            f"at {present.get('base_path')} has {present.get('base')}; name the one that the run began with in model.path"
        )
    return "" if before == now else f"holds adapters with {_text(before)}, and [lora] says {_text(now)}; use the same"


def _text(lora: Any) -> str:
    return ", ".join(f"{key} = {lora[key]}" for key in ("rank", "alpha", "target_modules", "adapters") if key in lora)
