"""The chat format of a model, for agents: messages and tools to ids, sampled ids to answers, exact bridges between turns."""

from gspo_services.rollout.rendering.create import create_renderer
from gspo_services.rollout.rendering.decoder import byte_of_character
from gspo_services.rollout.rendering.interface import (
    AnswerPiece,
    Arguments,
    Markers,
    Messages,
    Parsed,
    ParsedCall,
    Renderer,
    RenderingError,
    Stream,
    TooLongError,
    Tools,
)
from gspo_services.rollout.rendering.stops import without_stop

__all__ = [
    "AnswerPiece",
    "Arguments",
    "Markers",
    "Messages",
    "Parsed",
    "ParsedCall",
    "Renderer",
    "RenderingError",
    "Stream",
    "TooLongError",
    "Tools",
    "byte_of_character",
    "create_renderer",
    "without_stop",
]
