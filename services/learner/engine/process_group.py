"""The ranks as one process group: how this process joins it, and how long it waits for the others."""

from __future__ import annotations

import logging
import os
from datetime import timedelta

import deepspeed
import deepspeed.ops
import torch
import torch.distributed
from deepspeed.accelerator import get_accelerator
from torch.distributed import distributed_c10d

from gspo_services.learner.start import Device


def init_distributed(device: Device, timeout_s: float = 1800.0) -> None:
    """Join the process group that the environment of torchrun describes, or make one of this process alone, without a port.

    When a rank is missing from a collective for ``timeout_s``, the others raise.
    Raises: RuntimeError when DeepSpeed has chosen another device.
    """
    deepspeed.utils.logger.setLevel(logging.WARNING)
    found = get_accelerator().device_name()
    if found != device:
        raise RuntimeError(f"DeepSpeed has chosen {found}; set DS_ACCELERATOR={device} before the process starts")
    # This one needs SIMD kernels that a compiler would have to build; gloo alone is enough.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if torch.distributed.is_initialized():
        return
    backend = "nccl" if device == "cuda" else "gloo"
    if "RANK" not in os.environ:
        os.environ["LOCAL_RANK"] = "0"  # DeepSpeed reads it, even if it did not make the group.
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]  # public, missing from __all__
        # An NCCL barrier must know its device before the first collective.
        bound = torch.device("cuda", 0) if device == "cuda" else None
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1, device_id=bound)
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, timeout=timedelta(seconds=timeout_s))


def limit_waiting(timeout_s: float) -> None:
    """Give the process groups that DeepSpeed has made the timeout of the first; their default is half an hour."""
    # Public from PyTorch 2.14 on, which warns of the other name.
    set_timeout = getattr(torch.distributed, "set_timeout", None) or distributed_c10d._set_pg_timeout
    for group in list(distributed_c10d._world.pg_map):
        set_timeout(timedelta(seconds=timeout_s), group)
