"""The limits of a process that runs code of users. Linux only; elsewhere nothing is limited but time."""

import math
import os
import sys
from collections.abc import Mapping

LIMITS = ("memory_bytes", "file_bytes", "open_files", "processes")
"""Names of limits that hold from the start; ``cpu_s`` moves on with each episode."""


def limit_process(limits: Mapping[str, int | None]) -> None:
    """Lower the limits of this process and of those that it starts, for good. None leaves a limit as it is."""
    if sys.platform != "linux":
        return
    import resource

    kinds = (resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC)
    for name, kind in zip(LIMITS, kinds, strict=True):
        value = limits.get(name)
        if value is not None:
            _, hard = resource.getrlimit(kind)
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))
    # A core dump of a process of many gigabytes would fill the disk.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def allow_cpu(cpu_s: int | None) -> None:
    """Let this process use ``cpu_s`` more CPU seconds; then the kernel ends it (SIGXCPU)."""
    if cpu_s is None or sys.platform != "linux":
        return
    import resource

    times = os.times()
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    value = math.ceil(times.user + times.system) + cpu_s
    resource.setrlimit(resource.RLIMIT_CPU, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
