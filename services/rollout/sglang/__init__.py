"""One SGLang server: its process and its HTTP API."""

from services.rollout.sglang.adapters import Adapter
from services.rollout.sglang.client import Engine, EngineError, EngineRefused, PauseMode, RankChecksums
from services.rollout.sglang.generation import GenerateRequest, OutputPiece, SamplingParameters
from services.rollout.sglang.http import EngineHttp, EngineUnreachable
from services.rollout.sglang.memory import CACHE_MEMORY, WEIGHTS_MEMORY
from services.rollout.sglang.metrics import EngineMetrics
from services.rollout.sglang.server import EngineServer, ServerError, ServerOptions
from services.rollout.sglang.watch import fail_when_dead, fail_when_deaf

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
    "OutputPiece",
    "PauseMode",
    "RankChecksums",
    "SamplingParameters",
    "ServerError",
    "ServerOptions",
    "fail_when_dead",
    "fail_when_deaf",
]
