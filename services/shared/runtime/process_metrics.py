"""Metrics of every process, whatever its part in the run: its build, memory, CPU and files."""

import platform
from importlib.metadata import version
from typing import Final, Literal

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector

DISTRIBUTION: Final = "gspo"


def register_process(registry: CollectorRegistry, component: Literal["broker", "rollout", "learner"]) -> None:
    """Add ``gspo_build_info`` and the ``process_*`` metrics of this process to ``registry``."""
    ProcessCollector(registry=registry)
    info = Gauge(
        "gspo_build_info",
        "1, labelled with this process's part in the run and its release.",
        ["component", "version", "python"],
        registry=registry,
    )
    info.labels(component=component, version=version(DISTRIBUTION), python=platform.python_version()).set(1)
