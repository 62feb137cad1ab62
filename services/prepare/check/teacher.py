"""Checks of the teacher's directory: whether it can score the policy's tokens. It is not loaded."""

from __future__ import annotations

from pathlib import Path

from gspo_services.learner.start import read_model_config, require_teacher
from gspo_services.prepare.check.findings import Finding
from gspo_services.prepare.check.model import count
from gspo_services.prepare.check.situation import Situation
from gspo_services.shared.estimates import ModelShape, ShapeError, shape_of

WAY_OUT = "name the directory of a model with the policy's tokenizer in distillation.teacher"


def read_teacher(situation: Situation) -> tuple[ModelShape | None, list[Finding]]:
    """The teacher's shape, with what is wrong with it; nothing without one."""
    distillation = situation.settings.distillation
    if not distillation.teacher:
        return None, []
    path = Path(distillation.teacher)
    if not path.exists():
        return None, [situation.missing("teacher", f"distillation.teacher is {path}: there is no such directory.", WAY_OUT)]
    try:
        config = read_model_config(path)
        if (situation.model_path / "config.json").is_file():
            require_teacher(situation.settings, situation.model_path)
    except (ValueError, RecursionError) as error:
        text = str(error) if "distillation.teacher" in str(error) else f"distillation.teacher: {error}"
        return None, [Finding(check="teacher", status="fail", text=text, way_out=WAY_OUT)]
    if not any(path.glob("*.safetensors")):
        way_out = "download them, or save the model with save_pretrained"
        return None, [situation.missing("teacher", f"{path} has no weights (*.safetensors).", way_out)]
    beside = "alone" if distillation.only else f"beside the rewards, times {distillation.coefficient:g}"
    try:
        shape = shape_of(config)
    except ShapeError as error:
        text = f"{path / 'config.json'}: {error}: its memory and time are not estimated"
        return None, [Finding(check="teacher", status="warn", text=text, way_out="look at the free memory of a rank")]
    text = f"{path}: {count(shape.parameters)} parameters, whole on each rank; its log-ratio trains {beside}"
    return shape, [Finding(check="teacher", status="ok", text=text)]
