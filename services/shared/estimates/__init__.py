"""Estimates what a run will need and how fast it may be, from config.json and the settings. Pure: no files, no torch."""

from gspo_services.shared.estimates.amounts import Span, gib
from gspo_services.shared.estimates.colocate import KEPT_BY_ENGINE, ColocatedMemory, colocated_memory
from gspo_services.shared.estimates.engine import EngineMemory, engine_memory
from gspo_services.shared.estimates.hardware import Device, Hardware, device_named, known_devices
from gspo_services.shared.estimates.host import HostMemory, learner_host, rollout_host
from gspo_services.shared.estimates.learner import (
    CUDA_BYTES,
    LearnerMemory,
    activation_bytes_per_token,
    learner_memory,
    live_elements,
    trained_parameters,
)
from gspo_services.shared.estimates.roofline import Roofline, Traffic, roofline, traffic_of
from gspo_services.shared.estimates.shape import ModelShape, ShapeError, shape_of
from gspo_services.shared.estimates.speed import RunPace, Work, pace_of, work_of
from gspo_services.shared.estimates.table import MemoryRow, memory_rows, memory_text
from gspo_services.shared.estimates.versions import version_span

__all__ = [
    "CUDA_BYTES",
    "KEPT_BY_ENGINE",
    "ColocatedMemory",
    "Device",
    "EngineMemory",
    "Hardware",
    "HostMemory",
    "LearnerMemory",
    "MemoryRow",
    "ModelShape",
    "Roofline",
    "RunPace",
    "ShapeError",
    "Span",
    "Traffic",
    "Work",
    "activation_bytes_per_token",
    "colocated_memory",
    "device_named",
    "engine_memory",
    "gib",
    "known_devices",
    "learner_host",
    "learner_memory",
    "live_elements",
    "memory_rows",
    "memory_text",
    "pace_of",
    "rollout_host",
    "roofline",
    "shape_of",
    "traffic_of",
    "trained_parameters",
    "version_span",
    "work_of",
]
