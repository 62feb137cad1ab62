"""A model's chat template, rendered as transformers renders it: its files, its language, the messages that it takes."""

from gspo_services.rollout.chat_template.continuation import Continuation, Rewritten, continuation, stop_at
from gspo_services.rollout.chat_template.errors import TokenizerError
from gspo_services.rollout.chat_template.files import special_tokens
from gspo_services.rollout.chat_template.messages import for_template, require_arguments
from gspo_services.rollout.chat_template.template import NO_ARGUMENTS, SENTINEL, Arguments, ChatTemplate, Messages, Tools

__all__ = [
    "NO_ARGUMENTS",
    "SENTINEL",
    "Arguments",
    "ChatTemplate",
    "Continuation",
    "Messages",
    "Rewritten",
    "TokenizerError",
    "Tools",
    "continuation",
    "for_template",
    "require_arguments",
    "special_tokens",
    "stop_at",
]
