"""Tool calls in the text of an answer, in the formats that chat templates show to a model. Pure.

A call is read whole or not at all: what does not follow its format to the last character stays in the text, with the reason.
"""

from gspo_services.rollout.rendering.tool_calls.formats import (
    CALL_IS_ANSWER,
    Format,
    find_calls,
    format_of,
    marks_of,
    openers_of,
)
from gspo_services.rollout.rendering.tool_calls.values import has_repeated_key, make_call

__all__ = ["CALL_IS_ANSWER", "Format", "find_calls", "format_of", "has_repeated_key", "make_call", "marks_of", "openers_of"]
