"""Decisions and processes before torch is loaded."""

from gspo_services.learner.start.adaptable import require_adaptable
from gspo_services.learner.start.autoep import AUTOEP_FAMILIES, BIAS_BESIDE_ROUTER, autoep_config
from gspo_services.learner.start.engine_settings import Device, EngineSettings, engine_settings_of
from gspo_services.learner.start.expected_memory import log_expected_memory
from gspo_services.learner.start.fabric import warn_without_rdma
from gspo_services.learner.start.long_context import (
    TRAINED_LAYERS,
    position_limit,
    require_apart,
    require_positions,
    require_sequence_parallel,
)
from gspo_services.learner.start.parallelism import (
    gathering_config,
    offload_config,
    parallelism_of,
    require_supported,
)
from gspo_services.learner.start.ranks import Node, ended_by_signals, is_rank, run_ranks
from gspo_services.learner.start.teacher import require_teacher

__all__ = [
    "AUTOEP_FAMILIES",
    "BIAS_BESIDE_ROUTER",
    "TRAINED_LAYERS",
    "Device",
    "EngineSettings",
    "Node",
    "autoep_config",
    "ended_by_signals",
    "engine_settings_of",
    "gathering_config",
    "is_rank",
    "log_expected_memory",
    "offload_config",
    "parallelism_of",
    "position_limit",
    "require_adaptable",
    "require_apart",
    "require_positions",
    "require_sequence_parallel",
    "require_supported",
    "require_teacher",
    "run_ranks",
    "warn_without_rdma",
]
