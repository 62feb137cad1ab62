"""Logs at the start each rank's expected memory, so that the log explains a learner killed for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog

from gspo.model_files.configuration import read_config
from gspo_services.learner.start.engine_settings import Device
from gspo_services.shared.estimates import ShapeError, memory_rows, shape_of
from gspo_services.shared.settings import Settings

log = structlog.get_logger()


def log_expected_memory(model_config: Mapping[str, Any], settings: Settings, device: Device) -> None:
    """Log the table that ``gspo check`` prints, in GiB, one line for each row.

    ``model_config``: the model's config.json. Models of unknown shape have no table.
    """
    try:
        shape = shape_of(model_config)
        teacher = settings.distillation.directory
        parameters = shape_of(read_config(Path(teacher))).parameters if teacher else 0
    except ShapeError as error:
        log.info("memory_not_estimated", reason=str(error))
        return
    for row in memory_rows(shape, settings, cuda=device == "cuda", teacher_parameters=parameters):
        name, on_device, on_host, of_rank_0 = row.texts
        log.info("memory_of_a_rank_gib", what=name, device=on_device, host=on_host, rank_0_in_addition=of_rank_0)
