"""One SGLang server: its process and its HTTP API."""

from gspo_services.rollout.sglang.client import Engine, EngineError, EngineRefused, PauseMode, RankChecksums
from gspo_services.rollout.sglang.engine_adapters import Adapter
from gspo_services.rollout.sglang.generation import (
    GenerateRequest,
    OutputDecoder,
    OutputPiece,
    RequestRefused,
    SamplingParameters,
    generate_fields,
)
from gspo_services.rollout.sglang.http import EngineHttp, EngineUnreachable
from gspo_services.rollout.sglang.memory import CACHE_MEMORY, WEIGHTS_MEMORY
from gspo_services.rollout.sglang.metrics import EngineMetrics
from gspo_services.rollout.sglang.patching import RankSums
from gspo_services.rollout.sglang.routed import RoutedExperts
from gspo_services.rollout.sglang.scoring import scoring_fields
from gspo_services.rollout.sglang.server_process import EngineServer, ServerError, ServerOptions, ServerStartError
from gspo_services.rollout.sglang.watch import fail_when_dead, fail_when_deaf

__all__ = [
    "CACHE_MEMORY",
    "WEIGHTS_MEMORY",
    "Adapter",
    "Engine",
    "EngineError",
    "EngineHttp",
    "EngineMetrics",
    "EngineRefused",
    "EngineServer",
    "EngineUnreachable",
    "GenerateRequest",
    "OutputDecoder",
    "OutputPiece",
    "PauseMode",
    "RankChecksums",
    "RankSums",
    "RequestRefused",
    "RoutedExperts",
    "SamplingParameters",
    "ServerError",
    "ServerOptions",
    "ServerStartError",
    "fail_when_dead",
    "fail_when_deaf",
    "generate_fields",
    "scoring_fields",
]
