"""Finds the package's family of a model by comparing its renderings with the model's own chat template."""

import importlib.util
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, Final

import structlog

from gspo_services.rollout.rendering.interface import NO_ARGUMENTS, Arguments, RenderingError
from gspo_services.rollout.rendering.library import Family
from gspo_services.rollout.rendering.template import TemplateRenderer
from gspo_services.rollout.tokenizer import ChatTokenizer

log = structlog.get_logger()

Probe = tuple[list[dict[str, Any]], list[dict[str, Any]], str]
Probes = tuple[tuple[list[dict[str, Any]], list[dict[str, Any]]], ...]

FAMILIES: Final = (
    "qwen3", "qwen3.6", "qwen3.5", "qwen3.8", "qwen3-vl", "glm-4.5", "glm-5", "glm-5.1", "glm-5.3", "deepseek-v3",
    "deepseek-r1", "kimi-k2", "kimi-k2.5", "minimax-m2", "llama-3", "gemma4", "nemotron-3", "nemotron-3-ultra",
    "nemotron-3.5", "hy3", "prime-qwen3",
)  # fmt: skip
"""Families that are tried. gpt-oss is not: making its renderer downloads a vocabulary."""

_WEATHER: Final = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "exact": {"type": "boolean"}},
            "required": ["city"],
        },
    },
}
_CALL: Final = {
    "id": "call_0",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": 'Zürich "<b>"', "days": 3, "exact": True}},
}
_SYSTEM: Final = {"role": "system", "content": "Answer\nbriefly. "}
_USER: Final = {"role": "user", "content": "How is the weather?\n"}
_CALLS: Final = {"role": "assistant", "content": "I will look.", "tool_calls": [_CALL]}
_RESULT: Final = {"role": "tool", "tool_call_id": "call_0", "name": "weather", "content": '{"sky": "blue"}\n'}
_ANSWER: Final = {"role": "assistant", "content": "It is fine."}

PROBES: Final[Probes] = (
    ([_USER], []),
    ([_SYSTEM, _USER], [_WEATHER]),
    ([_USER, _CALLS, _RESULT], [_WEATHER]),
)
"""Conversations and tools that a family must render as the model's template does."""

HISTORY: Final[Probes] = (
    ([_USER, {**_CALLS, "reasoning_content": "Let me see.\n"}, _RESULT], [_WEATHER]),
    ([_SYSTEM, _USER, _ANSWER, _USER], []),
    ([_SYSTEM, _USER, _CALLS, _RESULT, _ANSWER, _USER], [_WEATHER, _WEATHER]),
)
"""Further ones: of the families that remain, the one that renders most of these. Not all are asked for: the package leaves
reasoning in earlier turns where some templates drop it."""


def is_installed() -> bool:
    """Return whether the package, an optional dependency, is installed."""
    return importlib.util.find_spec("renderers") is not None


def find_family(tokenizer: ChatTokenizer) -> Family | None:
    """Return the family that renders prompts as the model's own chat template does; None when none does."""
    template = TemplateRenderer(tokenizer, NO_ARGUMENTS)
    needed, further = list(_rendered(template, PROBES)), list(_rendered(template, HISTORY))
    best: Family | None = None
    most = -1
    for name in FAMILIES:
        for arguments in _defaults():
            try:
                family = Family(tokenizer, name, arguments)
            except RenderingError:
                continue
            if not needed or _num_different(family, needed):
                continue
            same = len(further) - _num_different(family, further)
            if same > most:
                best, most = family, same
    return best


def named_family(tokenizer: ChatTokenizer, name: str) -> Family:
    """Return the family of that name. Raises: RenderingError for an unknown name or a tokenizer of another family."""
    if not is_installed():
        raise RenderingError(f'renderer {name!r} needs the package renderers: pip install "gspo[agents]", or use "template"')
    if name not in (*FAMILIES, "gpt-oss"):
        raise RenderingError(f'there is no renderer {name!r}; there are "auto", "template", {", ".join(FAMILIES)}, gpt-oss')
    family = Family(tokenizer, name)
    different = _num_different(family, _rendered(TemplateRenderer(tokenizer, NO_ARGUMENTS), PROBES))
    if different:
        log.warning(
            "renderer_differs", renderer=name, different_probes=different, of=len(PROBES), model=str(tokenizer.directory)
        )
    return family


def _num_different(family: Family, probes: Iterable[Probe]) -> int:
    """Probes that the family renders to another text, or refuses.

    Compares texts, not ids: a family may tokenise a text differently from the template, whose ids are used.
    """
    return sum(family.rendered(messages, tools) != expected for messages, tools, expected in probes)


def _rendered(template: TemplateRenderer, probes: Probes) -> Iterator[Probe]:
    """Yield the probes that the template takes, with their texts."""
    for messages, tools in probes:
        try:
            yield messages, tools, template.prompt_text(messages, tools)
        except RenderingError:
            continue


def _defaults() -> Iterator[Arguments]:
    """Yield values that a template assumes but the package must be told; they differ within one family."""
    yield NO_ARGUMENTS
    yield {"enable_thinking": False}
    yield {"enable_thinking": True}
    # Without a time zone, as in templates.
    yield {"date_string": datetime.now().strftime("%d %b %Y")}
