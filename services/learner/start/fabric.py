"""Warns at the start when machines that train together are connected only by TCP."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import structlog

from gspo_services.learner.start.engine_settings import Device
from gspo_services.shared.estimates import ShapeError, gib, shape_of
from gspo_services.shared.settings import Settings

log = structlog.get_logger()

RDMA_DEVICES: Final = Path("/sys/class/infiniband")
"""InfiniBand, and Ethernet with RoCE."""
BFLOAT16_BYTES: Final = 2


def warn_without_rdma(
    model_config: Mapping[str, Any], settings: Settings, device: Device, devices: Path = RDMA_DEVICES
) -> None:
    """Warn when GPUs of several machines exchange weights or gradients and this machine has no RDMA device.

    Under ZeRO 3 every pass gathers all weights, and each layer waits for its own. NCCL then silently uses TCP.
    """
    if settings.learner.num_nodes == 1 or device != "cuda" or any(devices.glob("*")):
        return
    try:
        parameters = shape_of(model_config).parameters
    except ShapeError:
        parameters = 0
    log.warning(
        "no_rdma_between_machines",
        num_nodes=settings.learner.num_nodes,
        gathered_each_pass=gib(float(BFLOAT16_BYTES * parameters)) if settings.learner.zero_stage == 3 else "no weights",
        way_out=f"nothing in {devices}: give the pods their RDMA devices (component rdma), or train on one machine",
    )
