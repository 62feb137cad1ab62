"""Assigns GPUs and cores to each process of a run on one machine."""

from gspo_services.shared.placement.bfloat16 import require_bfloat16
from gspo_services.shared.placement.driver import require_driver
from gspo_services.shared.placement.kernels import require_kernels
from gspo_services.shared.placement.placement import (
    Placement,
    ProcessPlace,
    is_for_cuda,
    machine_of,
    placement_of,
    require_pythons,
)
from gspo_services.shared.placement.visible import Machine, named_gpus, this_machine, torch_is_for_cuda

__all__ = [
    "Machine",
    "Placement",
    "ProcessPlace",
    "is_for_cuda",
    "machine_of",
    "named_gpus",
    "placement_of",
    "require_bfloat16",
    "require_driver",
    "require_kernels",
    "require_pythons",
    "this_machine",
    "torch_is_for_cuda",
]
