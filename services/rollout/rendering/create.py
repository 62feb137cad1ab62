"""The renderer of a model."""

import structlog

from gspo_services.rollout.rendering.families import find_family, is_installed, named_family
from gspo_services.rollout.rendering.interface import Renderer
from gspo_services.rollout.rendering.library import LibraryRenderer
from gspo_services.rollout.rendering.template import TemplateRenderer
from gspo_services.rollout.tokenizer import ChatTokenizer

log = structlog.get_logger()


def create_renderer(tokenizer: ChatTokenizer, name: str = "auto", *, most_tokens: int | None = None) -> Renderer:
    """Return the renderer called ``name``: ``template`` for the model's own template alone, or a family of ``renderers``.

    ``auto`` takes the family whose ids are those of the model's template, and ``template`` where there is none or the
    package is not installed. ``most_tokens``: of a conversation; one of far more is refused (TooLongError) before it takes
    their memory and time. None: whoever asks is trusted. Raises: RenderingError.
    """
    if name == "template" or (name == "auto" and not is_installed()):
        return TemplateRenderer(tokenizer, most_tokens=most_tokens)
    family = find_family(tokenizer) if name == "auto" else named_family(tokenizer, name)
    log.info("renderer", model=str(tokenizer.directory), renderer="template" if family is None else family.name)
    if family is None:
        return TemplateRenderer(tokenizer, most_tokens=most_tokens)
    return LibraryRenderer(tokenizer, family, most_tokens=most_tokens)
