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

from services.learner.start import Device


def init_distributed(device: Device, timeout_s: float = 1800.0) -> None:
    """Join the process group of torchrun's environment, or make one of this process alone, without a port.

    A collective that some rank has not come to after ``timeout_s`` raises on the others.
    Raises: RuntimeError when DeepSpeed has taken to another device.
    """
    deepspeed.utils.logger.setLevel(logging.WARNING)
    found = get_accelerator().device_name()
    if found != device:
        raise RuntimeError(f"DeepSpeed has chosen {found}; set DS_ACCELERATOR={device} before the process starts")
    # Written for SIMD kernels that a compiler would have to build; gloo alone is enough.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if torch.distributed.is_initialized():
        return
    backend = "nccl" if device == "cuda" else "gloo"
    if "RANK" not in os.environ:
        os.environ["LOCAL_RANK"] = "0"  # DeepSpeed reads it, whoever made the group.
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]  # public, missing from __all__
        # A barrier of nccl must know its device before there has been any other collective.
        bound = torch.device("cuda", 0) if device == "cuda" else None
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1, device_id=bound)
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, timeout=timedelta(seconds=timeout_s))


def limit_waiting(timeout_s: float) -> None:
    """Give the process groups that DeepSpeed has made the timeout of the first; they were born with half an hour."""
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)
