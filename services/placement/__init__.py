"""Which GPUs and cores each process of a run on one machine gets."""

from services.placement.placing import Placement, ProcessPlace, machine_of, placement_of, require_pythons
from services.placement.visible import Machine, this_machine, torch_is_for_cuda

__all__ = [
    "Machine",
    "Placement",
    "ProcessPlace",
    "machine_of",
    "placement_of",
    "require_pythons",
    "this_machine",
    "torch_is_for_cuda",
]
