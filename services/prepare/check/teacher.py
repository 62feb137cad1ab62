"""Checks of the teacher's directory: whether it can score the policy's tokens. It is not loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from gspo.model_files.configuration import read_config
from gspo_services.learner.start import require_teacher
from gspo_services.prepare.check.findings import Finding
from gspo_services.prepare.check.model import count
from gspo_services.prepare.check.situation import Situation
from gspo_services.shared.estimates import ModelShape, ShapeError, shape_of
from gspo_services.shared.runtime.plain_text import without_passwords

WAY_OUT: Final = "name the directory of a model with the policy's tokenizer in distillation.teacher"
SERVED_WAY_OUT: Final = "serve a model there that has the policy's tokenizer and takes the run's longest sequences"
ASK_S: Final = 10.0
"""For its tokens. Log-probs of a long sequence may take a server the whole ``distillation.timeout_s``."""


def read_teacher(situation: Situation) -> tuple[ModelShape | None, list[Finding]]:
    """The teacher's shape, with what is wrong with it; nothing without one."""
    distillation = situation.settings.distillation
    if distillation.url:
        return None, [_server(situation)]
    if not distillation.teacher:
        return None, []
    path = Path(distillation.teacher)
    if not path.exists():
        return None, [situation.missing("teacher", f"distillation.teacher is {path}: there is no such directory.", WAY_OUT)]
    try:
        config = read_config(path)
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


def _server(situation: Situation) -> Finding:
    # Only now: a client of HTTP takes a tenth of a second to import.
    from gspo_services.learner.teacher import TeacherError, TeacherServer, require_same_texts

    distillation = situation.settings.distillation
    url = without_passwords(distillation.url)
    if not (situation.model_path / "tokenizer.json").is_file():
        text = f"{url}: not compared with the policy's tokenizer, which is not here"
        return Finding(check="teacher", status="note", text=text)
    longest = situation.settings.largest_sampling.max_tokens
    try:
        require_same_texts(TeacherServer(distillation.url, timeout_s=ASK_S, retry_s=0.0), situation.model_path)
        TeacherServer(distillation.url, timeout_s=distillation.timeout_s, retry_s=0.0).require_length(longest)
    except TeacherError as error:
        return situation.missing("teacher", f"{str(error).partition('. ')[0]}.", "start it, or correct distillation.teacher")
    except ValueError as error:
        return Finding(check="teacher", status="fail", text=str(error), way_out=SERVED_WAY_OUT, basis="tried")
    return Finding(
        check="teacher", status="ok", text=f"{url} has the policy's tokens and scores {longest} at once", basis="tried"
    )
